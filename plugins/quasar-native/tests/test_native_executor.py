"""The kernel ``native`` as an object: copies, threads, forks, options, refusals, and what the extension checks."""

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
from native_records import INSTRUCTIONS, record, records, rows

from quasar.errors import InvalidRequestError
from quasar.weights.record import QuantizedWeight
from quasar_native import _native
from quasar_native.kernel import NativeKernel, pack, pool_of
from quasar_native.plugin import quasar_kernels


def execute(weight: QuantizedWeight, inputs: torch.Tensor) -> torch.Tensor:
    return NativeKernel(1).prepare(weight)(inputs)


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
        from quasar.weights.record import QuantizedWeight
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
        ({"threads": 0}, "threads=0, expected an integer of at least 1"),
        ({"threads": True}, "threads=True, expected an integer of at least 1"),
        ({"threads": "2"}, "threads='2', expected an integer of at least 1"),
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
