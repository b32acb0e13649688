"""The blocks of a GGUF file map back to what the package gguf maps them back to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gguf_files import HALVES, ROUNDED, with_halves
from quasar.quantizers.gguf.blocks import BLOCK_FORMATS, record_of

RECORDED = sorted(BLOCK_FORMATS)


def kind(type_name: str):
    return gguf.GGMLQuantizationType[type_name]


@st.composite
def blocks(draw, type_name: str) -> np.ndarray:
    """``[rows, bytes of a row]``: any bytes, any finite numbers of 16 bits, zero among them."""
    rows, per_row = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    n, nbytes = rows * per_row, BLOCK_FORMATS[type_name].nbytes
    raw = np.frombuffer(draw(st.binary(min_size=n * nbytes, max_size=n * nbytes)), np.uint8).reshape(n, nbytes).copy()
    half = st.one_of(st.just(0.0), st.floats(width=16, allow_nan=False, allow_infinity=False))
    n_halves = n * len(HALVES[type_name])
    halves = np.array(draw(st.lists(half, min_size=n_halves, max_size=n_halves)), np.float16).reshape(n, -1)
    return with_halves(raw, type_name, halves).reshape(rows, -1)


@pytest.mark.parametrize("type_name", RECORDED)
@given(st.data())
def test_any_block_maps_back_to_what_the_library_maps_it_back_to(type_name, data):
    """Bit by bit without minimums; with them, to two units in the last place of the largest number that goes in."""
    rows = data.draw(blocks(type_name))
    record, expected = record_of(torch.from_numpy(rows), type_name), gguf.quants.dequantize(rows, kind(type_name))
    values, bits = record.dequantize(), record.bits
    assert -(2 ** (bits - 1)) <= int(record.values.min())
    assert int(record.values.max()) < 2 ** (bits - 1)
    if record.zero_points is None:
        assert torch.equal(values, torch.from_numpy(expected))
        return
    largest = record.scales.abs() * (record.zero_points.abs() + 2 ** (bits - 1))
    apart = (values - torch.from_numpy(expected)).abs().unflatten(1, (-1, record.group_size))
    assert (apart <= 2**-22 * largest.unsqueeze(-1)).all()


@pytest.mark.parametrize("type_name", [name for name in RECORDED if name in ROUNDED])
@given(st.integers(0, 9999))
def test_what_the_library_rounded_comes_back(type_name, seed):
    """Rows that mean something: scales of both signs, and minimums near the integers' range."""
    weight = np.random.default_rng(seed).normal(size=(4, 96)).astype(np.float32)
    rows = gguf.quants.quantize(weight, kind(type_name))
    record, expected = record_of(torch.from_numpy(rows), type_name), gguf.quants.dequantize(rows, kind(type_name))
    assert torch.allclose(record.dequantize(), torch.from_numpy(expected), rtol=0, atol=1e-6)
    assert record.group_size == 32
    assert record.bits == int(type_name[1])


def half_bytes(*numbers: float) -> bytes:
    return np.array(numbers, np.float16).tobytes()


def test_a_block_worked_by_hand():
    """Q4_0: weight i is the low nibble of byte i less 8, times the scale; weight 16 + i is the high one."""
    row = torch.frombuffer(bytearray(half_bytes(-0.5) + bytes([0xF0, *[0x88] * 15])), dtype=torch.uint8)
    record = record_of(row[None], "Q4_0")
    assert record.scales.tolist() == [[-0.5]]
    assert record.zero_points is None
    assert record.values.tolist() == [[-8, *[0] * 15, 7, *[0] * 15]]


@pytest.mark.parametrize("minimum", [-0.5, 0.0, 0.1])
def test_a_scale_of_zero_leaves_the_minimum_exactly(minimum):
    """A group of equal weights: integers of zero and the scale 1, whatever the nibbles say."""
    row = torch.frombuffer(bytearray(half_bytes(0.0, minimum) + bytes(range(16))), dtype=torch.uint8)
    record = record_of(row[None], "Q4_1")
    assert torch.equal(record.dequantize(), torch.full((1, 32), float(np.float16(minimum))))
    assert not record.values.any()
    assert record.scales.tolist() == [[1.0]]


def test_a_group_of_zero_scale_leaves_its_neighbours_alone():
    """Q4_K: eight groups, of which the 6-bit scales say that the first is flat."""
    block = np.full((1, 144), 0x21, np.uint8)
    with_halves(block, "Q4_K", np.array([[0.25, 0.125]], np.float16))
    block[0, 4] = 0  # scale 0, and the high bits of scale 4
    record = record_of(torch.from_numpy(block), "Q4_K")
    assert torch.equal(record.dequantize(), torch.from_numpy(gguf.quants.dequantize(block, kind("Q4_K"))))
    assert record.scales[0, 0] == 1.0
    assert not record.values[0, :32].any()
    assert record.values[0, 32:].any()
    assert record.dequantize()[0, 0] == -0.125 * (0x21 & 63)


def test_the_sizes_are_those_of_the_library():
    """Of a block: how many bytes, and how many weights come of them."""
    for type_name, block in BLOCK_FORMATS.items():
        size, nbytes = gguf.GGML_QUANT_SIZES[kind(type_name)]
        record = record_of(torch.zeros((1, nbytes), dtype=torch.uint8), type_name, "int8_per_group")
        assert (block.nbytes, record.shape) == (nbytes, (1, size))
        assert record.activations == "int8_per_group"
