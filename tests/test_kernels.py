"""Kernels: each computes exactly what the record of a quantized weight says, one row at a time."""

from __future__ import annotations

import warnings

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.errors import InvalidRequestError, UnknownStrategyError
from quasar.kernels import KernelChooser
from quasar.kernels.dense import DenseKernel
from quasar.kernels.reference import ReferenceKernel
from quasar.kernels.torch_int8 import TorchInt8Kernel, needs_split
from quasar.weights.activations import quantize_rows
from quasar.weights.record import QuantizedWeight, quantize_symmetric

SPLITS = [None, True] + ([] if needs_split() else [False])
"""Two 7-bit rows an activation are exact on every CPU, one 8-bit row on those with the instructions for it."""

KERNELS = {"reference": ReferenceKernel(), **{f"torch split={split}": TorchInt8Kernel(split) for split in SPLITS}}
WIDTHS = range(1, 17)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 70), st.integers(1, 200))


def randn(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def w8a8(weight: torch.Tensor) -> QuantizedWeight:
    """The record that the quantizer ``w8a8`` makes."""
    values, scales = quantize_symmetric(weight)
    return QuantizedWeight(values, scales, bits=8, activations="int8_per_token")


def grouped(out: int, groups: int, group_size: int, seed: int, **options) -> QuantizedWeight:
    """Random integers with a scale and a zero point a group."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (out, groups * group_size), dtype=torch.int8, generator=generator)
    scales = torch.rand((out, groups), generator=generator) + 0.1
    zero_points = torch.randint(-8, 8, (out, groups), generator=generator).float()
    return QuantizedWeight(values, scales, zero_points, bits=4, **options)


@given(shapes, st.integers(1, 16), seeds, st.floats(1e-3, 1e3))
@pytest.mark.parametrize("split", SPLITS)
def test_the_torch_kernel_equals_the_oracle_bit_by_bit(split, shape, width, seed, scale):
    """Its products are integers, so there is one right result and both kernels have it."""
    weight = w8a8(randn(*shape, seed=seed))
    inputs = randn(width, shape[1], seed=seed + 1, scale=scale)
    assert torch.equal(TorchInt8Kernel(split).prepare(weight)(inputs), ReferenceKernel().prepare(weight)(inputs))


@given(st.integers(1, 20), st.integers(1, 300), seeds)
@pytest.mark.parametrize("split", SPLITS)
def test_the_largest_values_do_not_saturate(split, out, size, seed):
    """Rows of ±127 times rows of ±127: where pairs of products are added in 16 bits, these overflow first."""
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randint(0, 2, (out, size), generator=generator) * 254 - 127).to(torch.int8)
    weight = QuantizedWeight(values, torch.ones(out, 1), activations="int8_per_token")
    inputs = torch.stack([values[0].float(), -values[0].float(), torch.full((size,), 127.0)])
    outputs = TorchInt8Kernel(split).prepare(weight)(inputs)
    assert torch.equal(outputs, inputs @ values.float().T)
    assert outputs[0, 0] == 127 * 127 * size


@given(shapes, seeds)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kernel, shape, seed):
    """Batched with other rows, a 50 times larger one among them, in any of 16 widths, a row keeps its bits."""
    execute = kernel.prepare(w8a8(randn(*shape, seed=seed)))
    inputs = randn(16, shape[1], seed=seed + 1)
    inputs[-1] *= 50
    alone = torch.cat([execute(row) for row in inputs.split(1)])
    for width in WIDTHS:
        assert torch.equal(execute(inputs[-width:]), alone[-width:]), f"width {width}"
    assert torch.equal(execute(inputs.reshape(2, 8, shape[1])).reshape(alone.shape), alone)


def torch_dynamic(weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """torch's own dynamic quantization, as ``torch.ao.quantization.quantize_dynamic`` runs it: one scale for a call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(weight, float(weight.abs().max() / 127), 0, torch.qint8)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    return torch.ops.quantized.linear_dynamic(inputs, packed, reduce_range=True)


def test_one_activation_scale_a_call_fails_the_test_of_rows():
    """The test above can fail: torch's dynamic quantization moves a row by far more than its own rounding error."""
    weight, inputs = randn(64, 64, seed=0), randn(4, 64, seed=1)
    exact = inputs @ weight.T
    own_error = (torch_dynamic(weight, inputs[:1])[0] - exact[0]).abs().max()
    inputs[3] *= 50
    moved = (torch_dynamic(weight, inputs)[0] - torch_dynamic(weight, inputs[:1])[0]).abs().max()
    assert moved > 3 * own_error


@given(shapes, seeds)
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_an_executor_gives_back_the_weight_that_it_was_made_of(kernel, shape, seed):
    """Integers, scales and all other fields, also from a packed layout."""
    weight = w8a8(randn(*shape, seed=seed))
    returned = kernel.prepare(weight).weight
    assert torch.equal(returned.values, weight.values)
    assert torch.equal(returned.scales, weight.scales)
    assert (returned.zero_points, returned.bits, returned.activations) == (None, 8, "int8_per_token")


def test_preparing_leaves_the_weight_as_it_was():
    """Executing does not write to it either: the record may be shared."""
    weight = w8a8(randn(8, 16, seed=0))
    values, scales = weight.values.clone(), weight.scales.clone()
    for kernel in KERNELS.values():
        execute = kernel.prepare(weight)
        first, inputs = execute(torch.ones(1, 16)), torch.ones(2, 16)
        execute(inputs)
        assert torch.equal(execute(torch.ones(1, 16)), first)
        assert torch.equal(inputs, torch.ones(2, 16))
    assert torch.equal(weight.values, values)
    assert torch.equal(weight.scales, scales)


@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 16), st.sampled_from([2, 3, 4, 8]), seeds)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_nearest_is_off_by_half_a_scale_at_most(dtype, out, groups, group_size, bits, seed):
    """``|w - dequantized| <= scale / 2`` (to float32 rounding), and the integers need no more than ``bits``."""
    weight = randn(out, groups * group_size, seed=seed).to(dtype)
    values, scales = quantize_symmetric(weight, bits, group_size)
    dequantized = QuantizedWeight(values, scales, bits=bits).dequantize()
    error = (weight.double() - dequantized.double()).abs().reshape(out, groups, group_size)
    assert (error <= scales.double().unsqueeze(2) * (0.5 + 1e-4)).all()
    assert values.abs().max() <= 2 ** (bits - 1) - 1
    assert (scales > 0).all()
    assert values.dtype == torch.int8
    assert scales.dtype == torch.float32


@given(st.integers(1, 50), st.integers(1, 300), seeds)
def test_activations_are_rounded_by_half_a_scale_at_most(width, size, seed):
    """Each row uses the whole range of its own scale."""
    rows = randn(width, size, seed=seed)
    integers, scales = quantize_rows(rows)
    assert ((rows - integers * scales).abs() <= scales * (0.5 + 1e-4)).all()
    assert torch.equal(integers.abs().amax(1), torch.full((width,), 127.0))
    assert torch.equal(integers, integers.round())


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_zeros_stay_zeros(kernel):
    """A row of zeros in the weight or in the input has no scale of its own, and must not become NaN."""
    weight = randn(5, 8, seed=0)
    weight[2] = 0
    record = w8a8(weight)
    inputs = randn(3, 8, seed=1)
    inputs[1] = 0
    outputs = kernel.prepare(record)(inputs)
    assert torch.equal(outputs[:, 2], torch.zeros(3))
    assert torch.equal(outputs[1], torch.zeros(5))
    assert outputs.isfinite().all()
    assert torch.equal(record.dequantize()[2], torch.zeros(8))
    assert record.scales[2] == 1


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_input_that_is_not_finite_is_not_hidden(kernel, bad):
    """The row's output is not finite either, so the loop can name it; the other rows are as without it."""
    execute = kernel.prepare(w8a8(randn(6, 8, seed=0)))
    inputs = randn(3, 8, seed=1)
    expected = execute(inputs)
    inputs[1, 4] = bad
    outputs = execute(inputs)
    assert not outputs[1].isfinite().any()
    assert torch.equal(outputs[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 16), (2, 3, 16), (0, 16), (1, 0, 16)], ids=str)
def test_outputs_have_the_dtype_and_the_leading_shape_of_the_inputs(kernel, dtype, shape):
    """``[..., in]`` to ``[..., out]``, in 16 bits as well, with the values of float32 rounded once at the end."""
    weight = w8a8(randn(24, 16, seed=0))
    inputs = randn(*shape, seed=1).to(dtype)
    outputs = kernel.prepare(weight)(inputs)
    assert outputs.dtype == dtype
    assert outputs.shape == (*shape[:-1], 24)
    assert torch.equal(outputs, ReferenceKernel().prepare(weight)(inputs.float()).to(dtype))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_inputs_may_lie_in_memory_in_any_order(kernel):
    """Views with strides give what their contiguous copies give."""
    execute = kernel.prepare(w8a8(randn(24, 16, seed=0)))
    inputs = randn(16, 5, seed=1).T
    assert torch.equal(execute(inputs), execute(inputs.contiguous()))
    assert torch.equal(execute(inputs[::2]), execute(inputs[::2].contiguous()))


def test_groups_and_zero_points_map_integers_back_as_defined():
    """``(values - zero_points) * scales``, group by group: a case by hand."""
    weight = QuantizedWeight(
        torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int8),
        torch.tensor([[0.5, 2.0], [1.0, 0.25]]),
        torch.tensor([[1.0, 0.0], [5.0, 8.0]]),
        bits=4,
    )
    assert weight.dequantize().tolist() == [[0.0, 0.5, 6.0, 8.0], [0.0, 1.0, -0.25, 0.0]]
    assert (weight.shape, weight.group_size, weight.nbytes) == ((2, 4), 2, 8 + 16 + 16)
    inputs = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 1.0]])
    assert ReferenceKernel().prepare(weight)(inputs).tolist() == [[14.5, 0.75], [9.0, 2.0]]


def as_defined(weight, inputs):
    """``inputs @ weight.T`` in float64, straight from the words of ``QuantizedWeight``."""
    size = weight.shape[1]
    group_of = torch.arange(size) // weight.group_size
    zero_points = torch.zeros_like(weight.scales) if weight.zero_points is None else weight.zero_points
    columns = (weight.values - zero_points[:, group_of]).double() * weight.scales[:, group_of]
    rows = inputs if weight.input_order is None else inputs[:, weight.input_order]
    if weight.activations == "none":
        return rows.double() @ columns.T
    pieces = rows.split(weight.group_size if weight.activations == "int8_per_group" else size, dim=1)
    rounded = []
    for piece in pieces:
        scales = piece.abs().amax(dim=1, keepdim=True) / 127 if weight.input_scale is None else weight.input_scale
        scales = torch.where(scales > 0, scales, 1)
        rounded.append((piece / scales).round().clamp(-127, 127).double() * scales)
    return torch.cat(rounded, dim=1) @ columns.T


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 16), seeds)
@pytest.mark.parametrize("activations", ["none", "int8_per_token", "int8_per_group", "int8_static"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kernel", [ReferenceKernel(), DenseKernel()], ids=["reference", "dense"])
def test_every_record_is_executed_by_its_definition(
    kernel, activations, symmetric, ordered, out, groups, group_size, seed
):
    """Any grouping and rounding of inputs, with zero points or without, columns in their order or another."""
    weight = grouped(out, groups, group_size, seed)
    size = weight.shape[1]
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    weight = attrs.evolve(
        weight,
        zero_points=None if symmetric else weight.zero_points,
        activations=activations,
        input_order=order if ordered and activations != "int8_per_group" else None,
        input_scale=torch.tensor(0.013) if activations == "int8_static" else None,
    )
    inputs = randn(5, size, seed=seed + 1)
    assert kernel.refuses(weight) is None
    torch.testing.assert_close(
        kernel.prepare(weight)(inputs).double(), as_defined(weight, inputs), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("split", [False, True])
def test_a_fixed_scale_of_inputs_is_executed_in_integers(split):
    """Exactly what the oracle gives, cut off beyond 127; the scale comes back with the unpacked weight."""
    weight = attrs.evolve(w8a8(randn(24, 32, seed=0)), activations="int8_static", input_scale=torch.tensor(0.01))
    if not split and needs_split():
        pytest.skip("this CPU's 8-bit products saturate")
    inputs = randn(5, 32, seed=1)
    assert (inputs.abs() > 1.27).any()
    executor = TorchInt8Kernel(split).prepare(weight)
    assert torch.equal(executor(inputs), ReferenceKernel().prepare(weight)(inputs))
    assert executor.weight.input_scale == weight.input_scale
    assert executor.weight.activations == "int8_static"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"values": torch.zeros(4, 8)}, "values are torch.float32 with 2 dimensions"),
        ({"scales": torch.ones(4, 3)}, r"scales \[4, 3\], expected \[4, groups\] .* divides 8"),
        ({"scales": torch.ones(3, 2)}, r"scales \[3, 2\]"),
        ({"zero_points": torch.ones(4, 1)}, r"zero_points \[4, 1\], expected \[4, 2\]"),
        ({"input_order": torch.arange(4)}, r"input_order is torch.int64 \[4\]"),
        ({"input_order": torch.arange(8), "activations": "int8_per_group"}, "would not lie together"),
        ({"input_order": torch.zeros(8, dtype=torch.int64)}, "input_order is no permutation"),
        ({"bits": 9}, "bits=9, expected an integer from 1 to 8"),
        ({"bits": 4.0}, "bits=4.0, expected an integer"),
        ({"activations": "int8"}, "activations='int8', expected one of none, int8_per_token"),
        ({"scales": torch.ones(4, 2, dtype=torch.float64)}, "are float32"),
        ({"zero_points": torch.ones(4, 2, dtype=torch.int8)}, "are float32"),
        ({"activations": "int8_static"}, "input_scale goes with"),
        ({"input_scale": torch.tensor(1.0)}, "input_scale goes with"),
    ],
)
def test_a_record_whose_parts_do_not_fit_is_refused(change, fault):
    """Where it is made, and not in a kernel later."""
    with pytest.raises(ValueError, match=fault):
        attrs.evolve(grouped(4, 2, 4, seed=0), **change)


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (attrs.evolve(w8a8(randn(4, 8, seed=0)), activations="none"), "needs int8 activations"),
        (grouped(4, 2, 4, 0, activations="int8_per_token"), "one symmetric scale an output channel"),
        (grouped(4, 1, 8, 0, activations="int8_per_token"), "one symmetric scale an output channel"),
        (attrs.evolve(w8a8(randn(4, 8, seed=0)), input_order=torch.arange(8)), "inputs in their order"),
        (
            QuantizedWeight(
                torch.empty(4, 8, dtype=torch.int8, device="meta"),
                torch.empty(4, 1, device="meta"),
                activations="int8_per_token",
            ),
            "runs on the CPU, the weight is on meta",
        ),
    ],
    ids=["weight-only", "groups", "zero points", "order of inputs", "device"],
)
def test_the_torch_kernel_says_why_it_refuses_a_weight(weight, reason):
    """The reason is for a user to read, when no kernel is left."""
    assert reason in TorchInt8Kernel().refuses(weight)
    with pytest.raises(InvalidRequestError, match=rf"no kernel executes a weight of shape \[4, 8\]: torch: .*{reason}"):
        KernelChooser("torch").choose(weight)


def test_the_fastest_kernel_that_does_not_refuse_a_weight_gets_it():
    """``auto`` falls back to the oracle for what nothing faster can execute."""
    chooser = KernelChooser()
    fast = w8a8(randn(4, 8, seed=0))
    assert TorchInt8Kernel().refuses(fast) is None
    assert chooser.choose(fast)[0] == "torch"
    assert chooser.choose(attrs.evolve(fast, activations="none"))[0] == "dense"
    assert chooser.choose(grouped(4, 2, 8, seed=0, activations="int8_per_token"))[0] == "dense"
    assert KernelChooser("reference").choose(fast)[0] == "reference"


def test_a_kernel_that_nothing_provides_is_refused_by_name():
    """With the names that there are."""
    with pytest.raises(UnknownStrategyError, match=r"no kernel named 'troch'.*Did you mean 'torch'"):
        KernelChooser("troch")


def test_a_cpu_without_exact_products_is_refused(monkeypatch):
    """What the CPU does is tried, not looked up: were its products not exact, the kernel would refuse every weight."""
    from quasar.kernels import torch_int8

    torch_int8._why_unavailable.cache_clear()
    monkeypatch.setattr(torch_int8, "_is_exact", lambda split: False)
    try:
        assert "not exact" in TorchInt8Kernel().refuses(w8a8(randn(4, 8, seed=0)))
        assert KernelChooser().choose(w8a8(randn(4, 8, seed=0)))[0] == "dense"
    finally:
        torch_int8._why_unavailable.cache_clear()
