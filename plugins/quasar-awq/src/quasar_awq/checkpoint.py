"""Reads checkpoints in the format ``awq``: layers of four bits, packed in one of three ways.

The layouts are those of AutoAWQ 0.2.9 (``awq/modules/linear``), and of whatever writes for it. A layer has ``qweight``,
``qzeros`` and ``scales``; what is stored as ``weight`` is stored in full, which is how the modules come that the
configuration lists as ``modules_to_not_convert``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quasar.errors import InvalidRequestError, NumericalError
from quasar.options import choice
from quasar.quantizers.options import group_size
from quasar.weights.record import QuantizedWeight

_BITS = 4
_MIDDLE = 8
_PER_INT32 = 32 // _BITS
_GEMM_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each four bits of a 32-bit integer hold, from the lowest on."""
_PARTS = ("qweight", "qzeros", "scales")


@attrs.frozen(eq=False)
class _Parts:
    """One unpacked layer: integers from 0 ``[out, in]``, scales and zero points ``[out, groups]``, float32."""

    integers: Tensor
    scales: Tensor
    zeros: Tensor


class AwqFormat:
    """One checkpoint's layers.

    Args:
        config: Its ``quantization_config``: ``version`` (``gemm``, ``gemv`` or ``gemv_fast``), ``bits``,
            ``group_size``; the older names ``w_bit`` and ``q_group_size`` are understood.

    Raises:
        InvalidRequestError: A version, a number of bits or a group size that is not supported.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = str(config.get("version") or config.get("format") or "gemm").lower()
        if config.get("backend") == "llm-awq":  # says that the layout is llm-awq's own, whatever the version
            version = "llm-awq"
        choice(*_READERS).check("version", version, who="awq")
        choice(_BITS).check("bits", config.get("bits", config.get("w_bit", _BITS)), who="awq")
        group = config.get("group_size", config.get("q_group_size", 128))
        group_size.check("group_size", group, who="awq")
        self._version, self._group = version, group

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight | None:
        """One layer; ``None`` where it is stored in full.

        Args:
            tensors: What is stored under ``name.``, by the last part of the names.

        Raises:
            InvalidRequestError: Tensors that are missing, or whose shapes or dtypes do not fit each other.
            NumericalError: A scale or zero point is not finite.
        """
        if not any(part in tensors for part in _PARTS):
            return None
        who = f"awq, {self._version}: layer {name}"
        if missing := [part for part in _PARTS if part not in tensors]:
            raise InvalidRequestError(f"{who} has no {' and no '.join(missing)}, but {', '.join(sorted(tensors))}")
        qweight, qzeros, scales = (tensors[part] for part in _PARTS)
        parts = _READERS[self._version](_Stored(who, qweight, qzeros, scales, self._group))
        for what, tensor in (("scales", parts.scales), ("qzeros", parts.zeros)):
            if not torch.isfinite(tensor).all():
                raise NumericalError(f"{name}.{what} has values that are not finite")
        values = (parts.integers - _MIDDLE).to(torch.int8)
        return QuantizedWeight(values, parts.scales, parts.zeros - _MIDDLE, bits=_BITS)


@attrs.frozen(eq=False)
class _Stored:
    """What a checkpoint stores of one layer, and how to call it in a message."""

    who: str
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    group: int

    def groups(self, size: int) -> int:
        """How many groups a row of ``size`` inputs has."""
        if self.group == -1:
            return 1
        if size % self.group:
            raise InvalidRequestError(f"{self.who}: group_size={self.group} does not divide its {size} inputs")
        return size // self.group

    def expect(
        self, part: str, shape: tuple[int | None, int | None], *dtypes: torch.dtype, padded: int | None = None
    ) -> None:
        """Check one tensor; a dimension ``None`` may have any length, and ``padded`` may be longer than it says."""
        tensor: Tensor = getattr(self, part)
        actual = list(tensor.shape)
        fits = len(actual) == 2 and all(
            expected is None or n == expected or (i == padded and n > expected)
            for i, (n, expected) in enumerate(zip(actual, shape, strict=True))
        )
        if not fits or tensor.dtype not in dtypes:
            lengths = ", ".join("any" if n is None else str(n) for n in shape)
            wanted = f"[{lengths}] of {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
            found = f"{actual} of {str(tensor.dtype).removeprefix('torch.')}"
            raise InvalidRequestError(f"{self.who}: {part} is {found}, expected {wanted}")


_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _read_gemm(stored: _Stored) -> _Parts:
    """``qweight`` ``[in, out/8]`` and ``qzeros`` ``[groups, out/8]`` int32, ``scales`` ``[groups, out]``."""
    stored.expect("qweight", (None, None), torch.int32)
    size, columns = stored.qweight.shape
    groups = stored.groups(size)
    stored.expect("qzeros", (groups, columns), torch.int32)
    stored.expect("scales", (groups, columns * _PER_INT32), *_FLOATS)
    integers, zeros = (_nibbles(packed, _GEMM_ORDER).T for packed in (stored.qweight, stored.qzeros))
    return _Parts(integers, stored.scales.T.float().contiguous(), zeros.float().contiguous())


def _read_gemv(stored: _Stored) -> _Parts:
    """``qweight`` ``[out, in/8]`` and ``qzeros`` ``[out, groups/8]`` int32, ``scales`` ``[out, groups]``; the groups
    are padded to a length that the kernel likes."""
    stored.expect("qweight", (None, None), torch.int32)
    out = stored.qweight.shape[0]
    groups = stored.groups(stored.qweight.shape[1] * _PER_INT32)
    stored.expect("qzeros", (out, -(-groups // _PER_INT32)), torch.int32, padded=1)
    stored.expect("scales", (out, groups), *_FLOATS, padded=1)
    integers, zeros = (_nibbles(packed, range(_PER_INT32)) for packed in (stored.qweight, stored.qzeros))
    return _Parts(integers, stored.scales[:, :groups].float(), zeros[:, :groups].float())


def _read_gemv_fast(stored: _Stored) -> _Parts:
    """``qweight`` ``[out/4, in]`` int16, ``scales`` ``[groups, out]``, and ``qzeros`` like the scales: minus the scale
    times the zero point. The groups are padded as in ``gemv``.

    Rows are interleaved by four, in blocks of 64 inputs, and 32 inputs stand in an order of their own.
    """
    stored.expect("qweight", (None, None), torch.int16)
    quarter, size = stored.qweight.shape
    if size % 64:
        raise InvalidRequestError(f"{stored.who}: qweight has {size} columns, expected a multiple of 64")
    groups, out = stored.groups(size), quarter * 4
    stored.expect("qzeros", (groups, out), *_FLOATS, padded=0)
    stored.expect("scales", (groups, out), *_FLOATS, padded=0)
    shifts = torch.arange(0, 16, _BITS, device=stored.qweight.device)
    nibbles = (stored.qweight.int().unsqueeze(2) >> shifts & 15).reshape(quarter, size // 64, 4, 64)
    rows = nibbles.transpose(1, 2).reshape(out, size // 32, 4, 2, 4)
    integers = rows.transpose(3, 4).transpose(2, 3).reshape(out, size)
    scales, shifted = (tensor[:groups].T.float().contiguous() for tensor in (stored.scales, stored.qzeros))
    return _Parts(integers, scales, torch.where(scales == 0, torch.zeros_like(scales), -shifted / scales))


_READERS: Mapping[str, Callable[[_Stored], _Parts]] = {
    "gemm": _read_gemm,
    "gemv": _read_gemv,
    "gemv_fast": _read_gemv_fast,
}


def _nibbles(packed: Tensor, order: Any) -> Tensor:
    """``[rows, n]`` int32 to ``[rows, 8 n]`` integers from 0; bits ``4 i …`` hold column ``order[i]`` of eight."""
    shifts = torch.tensor([_BITS * list(order).index(column) for column in range(_PER_INT32)], device=packed.device)
    return (packed.unsqueeze(2) >> shifts & 15).flatten(1)
