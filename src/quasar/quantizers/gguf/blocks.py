"""The block formats of GGUF files, taken apart into :class:`QuantizedWeight` without rounding anything again.

A row of a weight is a sequence of blocks, each with its integers and what maps them back. The layouts are those of the
structs ``block_q4_0`` … ``block_q6_K`` in ``ggml-common.h`` of the library ggml. They come in two kinds: ``scale · q``
with a signed q, and ``scale · q + minimum`` with an unsigned one, whose minimum becomes a zero point here. The values
that a record maps back to are therefore the file's own, but for the last bits of a float32 where there is a minimum.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from quasar.weights.record import ActivationScheme, QuantizedWeight


@attrs.frozen(eq=False)
class _Blocks:
    """n blocks taken apart.

    Args:
        integers: ``[n, weights]`` uint8: q where there are minimums, and q + 2^(bits−1) where there are none.
        scales: ``[n, groups]`` float32, of any sign.
        minimums: ``[n, groups]`` float32, or none.
    """

    integers: Tensor
    scales: Tensor
    minimums: Tensor | None = None


@attrs.frozen
class BlockFormat:
    """One type of block.

    Args:
        bits: Bits of an integer.
        nbytes: Bytes of a block.
        unpack: Takes ``[n, nbytes]`` uint8 apart.
    """

    bits: int
    nbytes: int
    unpack: Callable[[Tensor], _Blocks]


def record_of(rows: Tensor, type_name: str, activations: ActivationScheme = "none") -> QuantizedWeight:
    """The record of a weight that is stored as blocks.

    Args:
        rows: ``[out, bytes of a row]`` uint8, as the file has them.
        type_name: Key of :data:`BLOCK_FORMATS`.
        activations: How the record rounds its inputs.

    Returns:
        Integers lie in −2^(bits−1) … 2^(bits−1)−1. A group whose scale is zero is stored as integers of zero with the
        scale 1, and a zero point that maps back to its minimum.
    """
    block = BLOCK_FORMATS[type_name]
    out = rows.shape[0]
    parts = block.unpack(rows.reshape(-1, block.nbytes))
    n_groups = parts.scales.shape[1]
    values = _signed(parts.integers, block.bits).unflatten(1, (n_groups, -1))
    flat = parts.scales == 0
    if bool(flat.any()):
        values = values.masked_fill(flat.unsqueeze(-1), 0)
    values, scales = values.reshape(out, -1), parts.scales.masked_fill(flat, 1.0)
    zero_points = None
    if parts.minimums is not None:
        # weight = scale · (value + middle) + minimum, rounded once
        middle = torch.where(flat, 0, 2 ** (block.bits - 1))
        zero_points = (-parts.minimums.double() / scales.double() - middle).float().reshape(out, -1)
    return QuantizedWeight(values, scales.reshape(out, -1), zero_points, bits=block.bits, activations=activations)


def _signed(integers: Tensor, bits: int) -> Tensor:
    """uint8 of so many bits, minus 2^(bits−1), as int8."""
    signed: Tensor = (integers ^ 0x80).view(torch.int8) if bits == 8 else integers.view(torch.int8) - 2 ** (bits - 1)
    return signed


def _q8_0(blocks: Tensor) -> _Blocks:
    """Scale, then 32 signed bytes."""
    return _Blocks(blocks[:, 2:] ^ 0x80, _half(blocks, 0))  # flipping the sign's bit adds 128


def _q4_0(blocks: Tensor) -> _Blocks:
    """Scale, then 16 bytes: the low nibbles are the first half of the weights."""
    return _Blocks(_fields(blocks[:, 2:], 4, 16), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> _Blocks:
    """As Q4_0, with a minimum after the scale."""
    return _Blocks(_fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Blocks:
    """As Q4_0, with the fifth bits of all 32 weights before the nibbles."""
    return _Blocks(_fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4, _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Blocks:
    """As Q5_0, with a minimum after the scale."""
    integers = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return _Blocks(integers, _half(blocks, 0), _half(blocks, 2))


def _q2_k(blocks: Tensor) -> _Blocks:
    """A nibble of scale and one of minimum for each of 16 groups, 2-bit integers, and what the nibbles multiply."""
    nibbles, scale, minimum = blocks[:, :16], _half(blocks, 80), _half(blocks, 82)
    return _Blocks(_fields(blocks[:, 16:80], 2, 32), scale * (nibbles & 15), -minimum * (nibbles >> 4))


def _q3_k(blocks: Tensor) -> _Blocks:
    """Third bits, low two bits, sixteen 6-bit scales with an offset of 32, and what they multiply."""
    integers = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return _Blocks(integers, _half(blocks, 108) * (scales.float() - 32))


def _q4_k(blocks: Tensor) -> _Blocks:
    """What scales and minimums are multiplied with, eight 6-bit pairs of them, then nibbles in four chunks."""
    return _Blocks(_fields(blocks[:, 16:], 4, 32), *_scales_and_minimums(blocks))


def _q5_k(blocks: Tensor) -> _Blocks:
    """As Q4_K, with the fifth bits before the nibbles: bit j of byte i belongs to weight i of group j."""
    integers = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _Blocks(integers, *_scales_and_minimums(blocks))


def _q6_k(blocks: Tensor) -> _Blocks:
    """Low nibbles, high two bits, sixteen signed scales of a byte, and what they multiply."""
    integers = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    return _Blocks(integers, _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8))


def _scales_and_minimums(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of Q4_K and Q5_K: ``[n, 8]`` each.

    Of 12 bytes, the first four hold scales 0–3 and the next four minimums 0–3 in their low six bits. The last four
    hold the low nibbles of scales and minimums 4–7, whose high two bits are those of the first eight bytes.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), dim=1)
    minimums = torch.cat((second & 63, last >> 4 | second >> 6 << 4), dim=1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minimums


def _half(blocks: Tensor, start: int) -> Tensor:
    """``[n, 1]`` float32 of the float16 at a byte."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(packed: Tensor, bits: int, chunk: int) -> Tensor:
    """``[n, bytes]`` to ``[n, bytes · 8/bits]`` unsigned integers.

    Within a chunk of so many bytes, the lowest bits of all its bytes come first, then the next bits of all.
    """
    chunks = packed.contiguous().view(len(packed), -1, chunk)
    fields = chunks.new_empty((*chunks.shape[:2], 8 // bits, chunk))
    for number in range(8 // bits):  # shifts by one number are quick, by a tensor of several they are not
        fields[:, :, number] = (chunks >> number * bits) & (2**bits - 1)
    return fields.flatten(1)


BLOCK_FORMATS = {
    "Q8_0": BlockFormat(8, 34, _q8_0),
    "Q4_0": BlockFormat(4, 18, _q4_0),
    "Q4_1": BlockFormat(4, 20, _q4_1),
    "Q5_0": BlockFormat(5, 22, _q5_0),
    "Q5_1": BlockFormat(5, 24, _q5_1),
    "Q2_K": BlockFormat(2, 84, _q2_k),
    "Q3_K": BlockFormat(3, 110, _q3_k),
    "Q4_K": BlockFormat(4, 144, _q4_k),
    "Q5_K": BlockFormat(5, 176, _q5_k),
    "Q6_K": BlockFormat(6, 210, _q6_k),
}
"""By the name of the type in the package gguf."""
