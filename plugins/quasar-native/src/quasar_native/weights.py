"""From the linear layers of a transformers model to the weights of the engine, several in one where they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quasar.errors import UnsupportedModelError
from quasar.weights.linear import QuantizedLinear
from quasar.weights.record import QuantizedWeight
from quasar_native import _native
from quasar_native.kernel import NativeExecutor, pack

Matrix = QuantizedWeight | Tensor


class Weights:
    """Makes the engine's weights and counts them by format.

    Args:
        instructions: Name of the instruction set of the products.

    ``formats`` says of each format (``"w8 int8_per_token"``, ``"bfloat16"``) how many products have it.
    """

    def __init__(self, instructions: str) -> None:
        self._instructions = instructions
        self.formats: Counter[str] = Counter()

    def projection(self, layers: Sequence[tuple[str, nn.Module]]) -> tuple[list[_native.Linear], Tensor | None]:
        """Weights and bias of one product of the engine, which applies all ``layers``, by name, to the same input.

        Raises:
            UnsupportedModelError: One of them is no plain or quantized linear layer.
        """
        matrices = [_matrix(name, layer) for name, layer in layers]
        fused = [_join(matrices)] if _agree(matrices) else matrices
        self.formats.update(map(_format_of, fused))
        shared = _packed(layers[0][1], self._instructions) if len(layers) == 1 else None
        packed = [self._pack(matrix) for matrix in fused] if shared is None else [shared]
        return packed, _bias([layer for _, layer in layers], matrices)

    def _pack(self, matrix: Matrix) -> _native.Linear:
        if isinstance(matrix, QuantizedWeight):
            return pack(matrix, self._instructions)
        if matrix.dtype == torch.bfloat16:
            return _native.pack_bf16(matrix.contiguous().view(torch.int16), self._instructions)
        return _native.pack_f32(matrix.contiguous(), self._instructions)


def _matrix(name: str, layer: nn.Module) -> Matrix:
    if isinstance(layer, QuantizedLinear):
        return layer.executor.weight
    if type(layer) is not nn.Linear:
        raise UnsupportedModelError(f"{name} is a {type(layer).__name__}, not a linear layer")
    weight = layer.weight.detach()
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise UnsupportedModelError(f"{name} is in {weight.dtype}")
    return weight.float() if weight.dtype == torch.float16 else weight


def _packed(layer: nn.Module, instructions: str) -> _native.Linear | None:
    """What the kernel ``native`` has packed already."""
    executor = layer.executor if isinstance(layer, QuantizedLinear) else None
    return executor.packed_for(instructions) if isinstance(executor, NativeExecutor) else None


def _scheme(matrix: Matrix) -> tuple[object, ...]:
    if isinstance(matrix, Tensor):
        return (matrix.dtype,)
    return (matrix.bits, matrix.activations, matrix.scales.shape[1], matrix.zero_points is None)


def _agree(matrices: Sequence[Matrix]) -> bool:
    """Whether the rows of the matrices can be those of one: then an input is read, and rounded, once for all."""
    first = matrices[0]
    for other in matrices[1:]:
        if _scheme(other) != _scheme(first):
            return False
        if isinstance(first, QuantizedWeight) and isinstance(other, QuantizedWeight):
            for one, another in ((first.input_order, other.input_order), (first.input_scale, other.input_scale)):
                if (one is None) != (another is None):
                    return False
                if one is not None and another is not None and not torch.equal(one, another):
                    return False
    return True


def _join(matrices: Sequence[Matrix]) -> Matrix:
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([matrix for matrix in matrices if isinstance(matrix, Tensor)])
    records = [matrix for matrix in matrices if isinstance(matrix, QuantizedWeight)]
    zero_points = [record.zero_points for record in records if record.zero_points is not None]
    return QuantizedWeight(
        torch.cat([record.values for record in records]),
        torch.cat([record.scales for record in records]),
        torch.cat(zero_points) if zero_points else None,
        bits=first.bits,
        activations=first.activations,
        input_order=first.input_order,
        input_scale=first.input_scale,
    )


def _format_of(matrix: Matrix) -> str:
    if isinstance(matrix, Tensor):
        return str(matrix.dtype).removeprefix("torch.")
    groups = "" if matrix.scales.shape[1] == 1 else f" groups of {matrix.group_size}"
    return f"w{matrix.bits}{groups} {matrix.activations}"


def _bias(layers: Sequence[Any], matrices: Sequence[Matrix]) -> Tensor | None:
    biases: list[Tensor | None] = [layer.bias for layer in layers]
    if all(bias is None for bias in biases):
        return None
    parts = [
        torch.zeros(matrix.shape[0], dtype=torch.float32, device="cpu") if bias is None else bias.detach().float()
        for bias, matrix in zip(biases, matrices, strict=True)
    ]
    return torch.cat(parts)
