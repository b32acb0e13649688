"""The kernel ``native`` computes what the record of a quantized weight says, whatever the width, threads and CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_records import ACTIVATIONS, FORMS, INSTRUCTIONS, THREADS, record, records, rows

from quasar.kernels.reference import ReferenceKernel
from quasar.weights.activations import round_inputs
from quasar.weights.record import QuantizedWeight
from quasar_native import _native
from quasar_native.kernel import NativeKernel, pool_of

everywhere = pytest.mark.parametrize("instructions", INSTRUCTIONS)


def execute(weight: QuantizedWeight, inputs: torch.Tensor, instructions: str = "auto", threads: int = 1):
    return NativeKernel(threads, instructions).prepare(weight)(inputs)


def reference(weight: QuantizedWeight, inputs: torch.Tensor) -> torch.Tensor:
    return ReferenceKernel().prepare(weight)(inputs)


def is_exact(weight: QuantizedWeight) -> bool:
    """Whether there is one right result: one integer an output, times two scales."""
    one_sum = weight.scales.shape[1] == 1 and weight.zero_points is None and weight.input_order is None
    return one_sum and weight.activations in ("int8_per_token", "int8_static")


def sizes_of_terms(weight: QuantizedWeight, inputs: torch.Tensor) -> torch.Tensor:
    """What an output would be if none of its terms cancelled another: the measure of its rounding error."""
    unsigned = torch.ones_like(weight.scales)
    integers = QuantizedWeight(weight.values, unsigned, None, input_order=weight.input_order).dequantize().abs()
    scales = QuantizedWeight(torch.ones_like(weight.values), weight.scales, None, input_order=weight.input_order)
    zeros = 0 if weight.zero_points is None else weight.zero_points.abs().max()
    sizes = (integers + zeros) * scales.dequantize().abs()
    return round_inputs(inputs, weight).abs().double() @ sizes.double().T


@everywhere
@given(records(), st.integers(1, 20), st.integers(0, 2**31))
def test_products_are_those_of_the_oracle(instructions, weight, width, seed):
    """Bit by bit where the format has one right result, else to the rounding of float32."""
    inputs = rows(width, weight.shape[1], seed)
    outputs, expected = execute(weight, inputs, instructions), reference(weight, inputs)
    if is_exact(weight):
        assert torch.equal(outputs, expected)
    error = (outputs.double() - expected.double()).abs()
    assert (error <= 4e-6 * sizes_of_terms(weight, inputs) + 1e-30).all()


@given(records(), st.integers(1, 20))
def test_integers_have_the_same_bits_in_every_instruction_set(weight, width):
    """Sums of integers are exact, and what follows them has one order; floats too, where the CPU has FMA."""
    inputs = rows(width, weight.shape[1])
    sets = INSTRUCTIONS if weight.activations != "none" else [name for name in INSTRUCTIONS if name != "portable"]
    outputs = [execute(weight, inputs, instructions) for instructions in sets]
    assert all(torch.equal(other, outputs[0]) for other in outputs[1:])


def assert_rows_are_alone(multiply, inputs: torch.Tensor) -> None:
    """``multiply(inputs, threads)`` gives each row the bits that it has alone: at widths 1 to 32, on 1 to 4 threads."""
    alone = torch.cat([multiply(row, 1) for row in inputs.split(1)])
    for width in range(1, 33):
        first = (7 * width) % (len(inputs) - width + 1)
        for threads in THREADS if width in (1, 2, 8, 17, 32) else (1 + width % 4,):
            outputs = multiply(inputs[first : first + width], threads)
            assert torch.equal(outputs, alone[first : first + width]), f"width {width}, {threads} threads"


@everywhere
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_rows_beside_it(form, instructions):
    """At every width and number of threads, in every format: 333 outputs are divided among the threads unevenly."""
    weight = record(333, 384, **FORMS[form])
    executors = {threads: NativeKernel(threads, instructions).prepare(weight) for threads in THREADS}
    assert_rows_are_alone(lambda inputs, threads: executors[threads](inputs), rows(40, 384))


def float_product(weight: torch.Tensor, instructions: str):
    """A product with a weight in full, as the engine runs it."""
    is_half = weight.dtype == torch.bfloat16
    linear = (
        _native.pack_bf16(weight.view(torch.int16), instructions) if is_half else _native.pack_f32(weight, instructions)
    )

    def multiply(inputs: torch.Tensor, threads: int) -> torch.Tensor:
        outputs = torch.full((len(inputs), len(weight)), torch.nan)
        linear.multiply(inputs.contiguous(), outputs, pool_of(threads))
        return outputs

    return multiply


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_float_product_does_not_depend_on_the_rows_beside_it(dtype, instructions):
    """One order of sums a row, for the weights of a model in full precision as well."""
    weight = rows(333, 200).to(dtype)
    assert_rows_are_alone(float_product(weight, instructions), rows(40, 200))


@everywhere
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(1, 70), st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**31))
def test_float_products_are_those_of_float64(dtype, instructions, out, size, width, seed):
    """To the rounding of float32: a weight in bfloat16 is not rounded again, and neither are its inputs."""
    weight, inputs = rows(out, size, seed).to(dtype), rows(width, size, seed + 1)
    outputs = float_product(weight, instructions)(inputs, 1)
    error = (outputs.double() - inputs.double() @ weight.double().T).abs()
    assert (error <= 4e-6 * (inputs.double().abs() @ weight.double().abs().T)).all()


@everywhere
@given(st.integers(1, 20), st.integers(1, 300), st.integers(0, 2**31))
def test_the_largest_values_do_not_saturate(instructions, out, size, seed):
    """Rows of ±127 times rows of -128 and 127: pairs of such products barely fit in the 16 bits that AVX2 adds in."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.where(torch.rand((out, size), generator=generator) < 0.5, -128, 127).to(torch.int8)
    weight = QuantizedWeight(values, torch.ones(out, 1), activations="int8_per_token")
    inputs = torch.stack([values[0].float().sign() * 127, torch.full((size,), 127.0), torch.full((size,), -127.0)])
    assert torch.equal(execute(weight, inputs, instructions), inputs @ values.float().T)


@everywhere
def test_the_longest_sums_fit(instructions):
    """2**17 products of -128 and 127, the largest there are."""
    weight = QuantizedWeight(torch.full((2, 2**17), -128, dtype=torch.int8), torch.ones(2, 1))
    weight = QuantizedWeight(weight.values, weight.scales, activations="int8_per_token")
    inputs = torch.full((1, 2**17), 127.0)
    assert torch.equal(execute(weight, inputs, instructions), torch.full((1, 2), -128.0 * 127 * 2**17))


@everywhere
@pytest.mark.parametrize("size", [3, 16, 40])
def test_inputs_are_rounded_half_to_even_and_cut_off(size, instructions):
    """As ``quasar.weights.activations`` rounds them, at the end of a vector too."""
    weight = QuantizedWeight(
        torch.eye(size, dtype=torch.int8), torch.ones(size, 1), activations="int8_static", input_scale=torch.tensor(2.0)
    )
    inputs = torch.zeros(4, size)
    inputs[:, -1] = torch.tensor([1.0, 3.0, -5.0, 1e9])
    outputs = execute(weight, inputs, instructions)
    assert outputs[:, -1].tolist() == [0, 4, -4, 254]
    assert torch.equal(outputs[:, :-1], torch.zeros(4, size - 1))


@everywhere
@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_input_that_is_not_finite_is_not_hidden(bad, activations, instructions):
    """Its row's outputs are not finite either, but that a fixed scale cuts infinities off; other rows are as ever."""
    weight = record(33, 50, 25, activations=activations)
    inputs = rows(3, 50)
    expected = execute(weight, inputs, instructions)
    inputs[1, 40] = bad
    outputs = execute(weight, inputs, instructions)
    if activations == "int8_static" and bad == bad:
        assert torch.equal(outputs[1], execute(weight, inputs.clamp(-1e9, 1e9), instructions)[1])
    else:
        assert not outputs[1].isfinite().any()
        assert activations == "none" or outputs[1].isnan().all()
    assert torch.equal(outputs[[0, 2]], expected[[0, 2]])


@everywhere
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_zeros_stay_zeros(activations, instructions):
    """A row of zeros has no scale of its own, and must not become NaN."""
    outputs = execute(record(20, 64, 32, activations=activations), torch.zeros(2, 64), instructions)
    assert torch.equal(outputs, torch.zeros(2, 20))


@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 16), (2, 3, 16), (0, 16), (1, 0, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_outputs_have_the_dtype_and_the_leading_shape_of_the_inputs(dtype, shape):
    """``[..., in]`` to ``[..., out]``, in 16 bits as well, with the values of float32 rounded once at the end."""
    weight = record(24, 16, 16, activations="int8_per_token")
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    outputs = execute(weight, inputs)
    assert outputs.dtype == dtype
    assert outputs.shape == (*shape[:-1], 24)
    assert torch.equal(outputs, reference(weight, inputs.float()).to(dtype))


def test_tensors_may_lie_in_memory_in_any_order():
    """Transposed, strided or wanting a gradient: inputs and the tensors of the record are read as what they are."""
    weight = record(24, 16, 8, zero_points=True, activations="int8_per_group")
    expected = execute(weight, rows(6, 16))
    strided = rows(6, 16).T.contiguous().T.requires_grad_()
    other = QuantizedWeight(
        weight.values.T.contiguous().T,
        weight.scales.T.contiguous().T.requires_grad_(),
        weight.zero_points.T.contiguous().T,
        activations="int8_per_group",
    )
    assert torch.equal(execute(weight, strided), expected)
    assert torch.equal(execute(other, rows(6, 16)), expected)
    assert torch.equal(execute(weight, rows(6, 32)[:, ::2]), execute(weight, rows(6, 32)[:, ::2].clone()))


def test_a_long_prompt_is_multiplied_in_parts():
    """More rows than are rounded at once: each has the bits that it has alone."""
    weight = record(40, 64, 32, activations="int8_per_group")
    inputs = rows(600, 64)
    outputs = execute(weight, inputs, threads=2)
    for row in (0, 255, 256, 511, 512, 599):
        assert torch.equal(outputs[row : row + 1], execute(weight, inputs[row : row + 1]))
