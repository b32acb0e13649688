"""The kernel ``native`` computes what the record of a quantized weight says, whatever the width, threads and CPU."""

from __future__ import annotations

import ast
import copy
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_records import ACTIVATIONS, FORMS, INSTRUCTIONS, THREADS, record, records, rows

from quasar.errors import InvalidRequestError
from quasar.kernels.activations import round_inputs
from quasar.kernels.reference import ReferenceKernel
from quasar.quantizers.weight import QuantizedWeight
from quasar_native import _native
from quasar_native.kernel import NativeKernel, pack, pool_of
from quasar_native.plugin import quasar_kernels

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
    """As ``quasar.kernels.activations`` rounds them, at the end of a vector too."""
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


@given(records())
def test_an_executor_gives_back_the_weight_that_it_was_made_of(weight):
    """Every field, from a packed layout with or without halves of bytes; a copy through pickle as well."""
    executor = NativeKernel(1).prepare(weight)
    for returned in (executor.weight, pickle.loads(pickle.dumps(executor)).weight):
        assert returned.tensors().keys() == weight.tensors().keys()
        assert all(torch.equal(tensor, weight.tensors()[name]) for name, tensor in returned.tensors().items())
        assert (returned.bits, returned.activations) == (weight.bits, weight.activations)


def test_a_copy_computes_the_same():
    """``copy.deepcopy`` of a model copies its executors, which must keep their options."""
    weight, inputs = record(24, 16, 8, activations="int8_per_token"), rows(3, 16)
    executor = NativeKernel(2, "portable").prepare(weight)
    assert torch.equal(copy.deepcopy(executor)(inputs), executor(inputs))


def test_preparing_and_executing_leave_their_arguments_as_they_were():
    """The record may be shared, and the inputs belong to the model."""
    weight, inputs = record(8, 16, 16, activations="int8_per_token"), rows(2, 16)
    before = {name: tensor.clone() for name, tensor in weight.tensors().items()}
    kept = inputs.clone()
    execute(weight, inputs)
    assert torch.equal(inputs, kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weight.tensors().items())


@pytest.mark.parametrize("values", [(-8, 8), (0, 16), (5, 6), (112, 128)], ids=str)
def test_values_of_four_bits_take_half_a_byte(values):
    """Whatever range of 16 they lie in; one value more takes a byte."""
    integers = torch.randint(*values, (32, 64), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    narrow = QuantizedWeight(integers, torch.ones(32, 1))
    integers = integers.clone()
    integers[0, :2] = torch.tensor([values[1] - 17, values[1] - 1])
    wide = QuantizedWeight(integers, torch.ones(32, 1))
    assert pack(narrow, "auto").nbytes == 32 * 64 / 2 + 32 * 4
    assert pack(wide, "auto").nbytes == 32 * 64 + 32 * 4
    for weight in (narrow, wide):
        assert torch.equal(execute(weight, torch.eye(64)), weight.dequantize().T)


def test_python_threads_may_call_it_at_once():
    """One executor, one pool and scratch memory of its own for each thread; products long enough to overlap."""
    weight = record(2048, 1536, 32, activations="int8_per_group")
    executor = NativeKernel(2).prepare(weight)
    inputs = [rows(width, 1536, width) for width in (5, 8, 16, 33)]
    expected = [execute(weight, batch) for batch in inputs]

    def all_are_right(index: int) -> bool:
        return all(torch.equal(executor(inputs[index]), expected[index]) for _ in range(40))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(all_are_right, range(4)))


def test_a_forked_child_multiplies_too():
    """It has none of the threads that its parent's pool had started, and does not wait for them at its end either."""
    script = """if True:
        import gc, os, torch
        from quasar.quantizers.weight import QuantizedWeight
        from quasar_native.kernel import NativeKernel, pool_of
        weight = QuantizedWeight(torch.ones((512, 512), dtype=torch.int8), torch.ones(512, 1))
        execute = NativeKernel(2).prepare(weight)
        expected = execute(torch.ones(1, 512))
        child = os.fork()
        if child == 0:
            right = torch.equal(execute(torch.ones(1, 512)), expected)
            del execute
            pool_of.cache_clear()
            gc.collect()
            os._exit(0 if right else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"threads": 0}, "threads=0, expected a positive integer"),
        ({"threads": True}, "threads=True, expected a positive integer"),
        ({"threads": "2"}, "threads='2', expected a positive integer"),
        ({"instructions": "mmx"}, "instructions='mmx', this CPU has auto, portable"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_honoured_says_why(options, complaint):
    """In one line with what was asked."""
    with pytest.raises(InvalidRequestError, match=f"native: {complaint}"):
        NativeKernel(**options)


def test_the_environment_names_the_instructions(monkeypatch):
    """Where the option does not; a name that means nothing here is an error, not the default."""
    monkeypatch.setenv("QUASAR_NATIVE_INSTRUCTIONS", "portable")
    assert _native.chosen_instructions("auto") == "portable"
    assert _native.chosen_instructions(INSTRUCTIONS[-1]) == INSTRUCTIONS[-1]
    monkeypatch.setenv("QUASAR_NATIVE_INSTRUCTIONS", "sse9")
    with pytest.raises(InvalidRequestError, match="sse9"):
        NativeKernel()


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (QuantizedWeight(torch.ones((1, 2), dtype=torch.int8, device="meta"), torch.ones(1, 1)), "on meta"),
        (QuantizedWeight(torch.ones((0, 2), dtype=torch.int8), torch.ones(0, 1)), "nothing to multiply"),
        (QuantizedWeight(torch.ones((1, 2**18), dtype=torch.int8), torch.ones(1, 1)), "a group has 262144"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_weight_that_it_cannot_execute_is_refused(weight, reason):
    """So that another kernel gets it, or the user an answer."""
    assert reason in NativeKernel().refuses(weight)


@given(records())
def test_every_other_weight_is_executed(weight):
    """Any bits, groups, zero points, order and rounding."""
    assert NativeKernel(1).refuses(weight) is None


@pytest.mark.parametrize(
    "change",
    [
        {"scales": torch.ones(7, 1)},
        {"zero_points": torch.ones(8, 2)},
        {"input_order": torch.arange(15)},
        {"input_order": torch.arange(1, 17)},
        {"input_order": torch.arange(-1, 15)},
        {"activations": "int4"},
        {"instructions": "sse9"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_extension_checks_what_it_would_read(change):
    """A shape or index that does not fit raises, it does not read beyond the end of an array."""
    given = {
        "values": torch.ones((8, 16), dtype=torch.int8),
        "scales": torch.ones(8, 1),
        "zero_points": None,
        "input_order": None,
        "activations": "none",
        "input_scale": 0.0,
        "instructions": "auto",
    }
    _native.pack(**given)
    with pytest.raises(ValueError, match=r"\w+"):
        _native.pack(**{**given, **change})


def test_the_extension_checks_the_arrays_of_a_product():
    """Sizes of inputs and outputs, and that outputs lie in the order that is written."""
    linear, pool = pack(record(8, 16, 16), "auto"), pool_of(1)
    linear.multiply(torch.ones(2, 16), torch.empty(2, 8), pool)
    for inputs, outputs in [((2, 15), (2, 8)), ((2, 16), (2, 9)), ((2, 16), (1, 8))]:
        with pytest.raises(ValueError, match=r"inputs have not|outputs have not"):
            linear.multiply(torch.ones(inputs), torch.empty(outputs), pool)
    with pytest.raises(TypeError):
        linear.multiply(torch.ones(2, 16), torch.empty(8, 2).T, pool)


def test_hook_names_the_kernel():
    """An installed package is found by its entry point."""
    assert quasar_kernels()["native"] == f"{NativeKernel.__module__}:{NativeKernel.__name__}"
    assert [entry.value for entry in entry_points(group="quasar", name="native")] == ["quasar_native.plugin"]


def test_the_stub_names_what_the_compiled_module_has():
    stub = ast.parse(Path(_native.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    stated = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert set(stated) == {name for name in vars(_native) if not name.startswith("_")}
    for name, node in stated.items():
        if isinstance(node, ast.ClassDef):
            members = {child.name for child in node.body if isinstance(child, ast.FunctionDef)} - {"__init__"}
            assert members == {member for member in vars(getattr(_native, name)) if not member.startswith("_")}
