"""The kernel ``native``: compiled products for every quantized weight, on CPUs."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.options import integer
from quasar.weights.record import QuantizedWeight
from quasar_native import _native

_LONGEST_GROUP = 2**17


class NativeKernel:
    """Executes weights of any bits, groups, zero points, order of inputs and rounding of activations.

    Integers times integers are added up as integers, in every instruction set to the same bits; floats in one order.

    Args:
        threads: How many work on a product; ``None``: as many as torch uses now.
        instructions: ``"portable"``, ``"avx2"``, ``"avx_vnni"`` or ``"avx512"``; ``"auto"``: what the environment
            variable ``QUASAR_NATIVE_INSTRUCTIONS`` names, else the widest that this CPU has.

    Raises:
        InvalidRequestError: This CPU has not those instructions, or ``threads`` is no positive integer.
    """

    speed = 20

    def __init__(self, threads: int | None = None, instructions: str = "auto") -> None:
        self._threads = checked_threads(threads)
        self._instructions = checked_instructions(instructions)

    def refuses(self, weight: QuantizedWeight) -> str | None:
        if weight.values.device.type != "cpu":
            return f"runs on the CPU, the weight is on {weight.values.device}"
        if 0 in weight.shape:
            return "has nothing to multiply"
        if weight.group_size > _LONGEST_GROUP:
            return f"adds up {_LONGEST_GROUP} products at most, a group has {weight.group_size}"
        return None

    def prepare(self, weight: QuantizedWeight) -> NativeExecutor:
        return NativeExecutor(weight, self._threads, self._instructions)


class NativeExecutor:
    """One weight, kept in the order in which its product reads it, from the first product on.

    Until then it is kept as it came: the engine packs several layers into one, and most are never executed by
    themselves. Several threads may call it at once. The interpreter's lock is released meanwhile.
    """

    def __init__(self, weight: QuantizedWeight, threads: int, instructions: str) -> None:
        self._options = (threads, instructions)
        self._pool = pool_of(threads)
        self._weight: QuantizedWeight | None = weight
        self._packed: _native.QuantizedLinear | None = None
        self._packing = threading.Lock()
        self._shape, self._n_groups = weight.shape, weight.scales.shape[1]
        self._has_zero_points = weight.zero_points is not None
        self._fields: dict[str, Any] = {
            "bits": weight.bits,
            "activations": weight.activations,
            "input_order": weight.input_order,
            "input_scale": weight.input_scale,
        }

    @property
    def weight(self) -> QuantizedWeight:
        """The weight; after the first product it is unpacked anew at each access."""
        if (weight := self._weight) is not None:
            return weight
        values = torch.empty(self._shape, dtype=torch.int8, device="cpu")
        scales = torch.empty((self._shape[0], self._n_groups), dtype=torch.float32, device="cpu")
        zero_points = torch.empty_like(scales) if self._has_zero_points else None
        self._linear().unpack(values, scales, zero_points)
        return QuantizedWeight(values, scales, zero_points, **self._fields)

    def _linear(self) -> _native.QuantizedLinear:
        """The packed weight."""
        with self._packing:
            if self._weight is not None:
                self._packed = pack(self._weight, self._options[1])
                self._weight = None
        assert self._packed is not None
        return self._packed

    def packed_for(self, instructions: str) -> _native.QuantizedLinear | None:
        """The packed weight, if it is laid out for those instructions. It never changes, so it may be shared."""
        return self._linear() if self._options[1] == instructions else None

    def __call__(self, inputs: Tensor) -> Tensor:
        out, size = self._shape
        rows = inputs.detach().reshape(-1, size).to(torch.float32).contiguous()
        outputs = torch.empty((rows.shape[0], out), dtype=torch.float32, device="cpu")
        self._linear().multiply(rows, outputs, self._pool)
        return outputs.view(*inputs.shape[:-1], out).to(inputs.dtype)

    def __reduce__(self) -> tuple[type[NativeExecutor], tuple[QuantizedWeight, int, str]]:
        return type(self), (self.weight, *self._options)


def pack(weight: QuantizedWeight, instructions: str) -> _native.QuantizedLinear:
    """Lay a weight out for the products of one instruction set."""
    zero_points, order = weight.zero_points, weight.input_order
    return _native.pack(
        weight.values.detach().contiguous(),
        weight.scales.detach().to(torch.float32).contiguous(),
        None if zero_points is None else zero_points.detach().to(torch.float32).contiguous(),
        None if order is None else order.contiguous(),
        weight.activations,
        0.0 if weight.input_scale is None else float(weight.input_scale),
        instructions,
    )


@functools.cache
def pool_of(threads: int) -> _native.ThreadPool:
    """The pool with so many threads that all of this process share."""
    return _native.ThreadPool(threads)


def checked_threads(threads: int | None) -> int:
    """How many threads to use where ``threads`` were asked for."""
    if threads is None:
        return torch.get_num_threads()
    return int(integer(at_least=1).accepted("threads", threads, who="native"))


def checked_instructions(instructions: str) -> str:
    """The name of the instruction set to use where ``instructions`` were asked for."""
    try:
        return _native.chosen_instructions(str(instructions))
    except ValueError as error:
        raise InvalidRequestError(f"native: {error}") from error
