"""Quantized weights of every form, and float weights, for the tests of the kernel."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from quasar.weights.record import QuantizedWeight
from quasar_native import _native

INSTRUCTIONS = _native.available_instructions()
ACTIVATIONS = ("none", "int8_per_token", "int8_per_group", "int8_static")
THREADS = (1, 2, 3, 4)

FORMS = {
    f"{name}, activations {activations}": {**form, "activations": activations}
    for name, form in {
        "a scale a channel": {"group_size": 384},
        "groups of 32": {"group_size": 32},
        "4 bits with zero points in groups of 32": {"group_size": 32, "bits": 4, "zero_points": True},
        "4 bits with zero points in groups of 64": {"group_size": 64, "bits": 4, "zero_points": True},
        "4 bits with zero points in groups of 128": {"group_size": 128, "bits": 4, "zero_points": True},
    }.items()
    for activations in ACTIVATIONS
}
"""Arguments of :func:`record` for 384 inputs."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def record(
    out: int,
    size: int,
    group_size: int,
    *,
    bits: int = 8,
    zero_points: bool = False,
    ordered: bool = False,
    activations: str = "none",
    seed: int = 0,
) -> QuantizedWeight:
    """Random integers of all that ``bits`` can say, with scales of both signs."""
    draw = generator(seed)
    groups = (out, size // group_size)
    signs = torch.randint(0, 2, groups, generator=draw) * 2 - 1
    return QuantizedWeight(
        torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (out, size), dtype=torch.int8, generator=draw),
        (torch.rand(groups, generator=draw) + 0.1) * signs,
        torch.rand(groups, generator=draw) * 9 - 4.5 if zero_points else None,
        bits=bits,
        activations=activations,
        input_order=torch.randperm(size, generator=draw) if ordered else None,
        input_scale=torch.tensor(0.02) if activations == "int8_static" else None,
    )


def rows(n: int, size: int, seed: int = 1) -> torch.Tensor:
    """Inputs of very different sizes, one row much larger than the others."""
    inputs = torch.randn(n, size, generator=generator(seed))
    inputs[-1:] *= 50
    return inputs


@st.composite
def records(draw: st.DrawFn, activations: str | None = None) -> QuantizedWeight:
    """Any form, with sizes that are multiples of nothing."""
    chosen = activations or draw(st.sampled_from(ACTIVATIONS), label="activations")
    group_size = draw(st.sampled_from([1, 2, 5, 8, 13, 32, 50, 64, 100, 128]), label="group size")
    return record(
        draw(st.integers(1, 70), label="out"),
        group_size * draw(st.integers(1, 5), label="groups"),
        group_size,
        bits=draw(st.sampled_from([2, 3, 4, 8]), label="bits"),
        zero_points=draw(st.booleans(), label="zero points"),
        ordered=chosen != "int8_per_group" and draw(st.booleans(), label="ordered"),
        activations=chosen,
        seed=draw(st.integers(0, 2**31), label="seed"),
    )
