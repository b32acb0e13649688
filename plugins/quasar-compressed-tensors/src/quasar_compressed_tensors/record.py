"""From the tensors of one layer to its record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

import attrs
import torch
from compressed_tensors.compressors.pack_quantized import unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import quantize
from torch import Tensor

from quasar.errors import InvalidRequestError, NumericalError
from quasar.weights.record import QuantizedWeight
from quasar_compressed_tensors.schemes import Scheme

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def record_of(name: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
    """The record of a layer that is stored as its scheme says.

    Values, scales and zero points are the checkpoint's own: what the record maps back to equals, bit by bit in the
    dtype of the scales, what the library decompresses.

    Raises:
        InvalidRequestError: A tensor is missing, or its shape, dtype or values do not fit.
        NumericalError: A scale is not finite.
    """
    stored = _Stored(name, scheme, tensors)
    matrix = stored.matrix()
    order = stored.input_order(matrix.shape[1])
    columns = matrix if order is None else matrix[:, order]
    scales, zero_points = stored.scales(matrix.shape), stored.zero_points(matrix.shape)
    return QuantizedWeight(
        stored.integers(columns, scales, zero_points),
        scales.float().contiguous(),
        None if zero_points is None else zero_points.float().contiguous(),
        bits=scheme.weights.num_bits,
        activations=scheme.activations,
        input_order=order,
        input_scale=stored.input_scale(),
    )


@attrs.frozen(eq=False)
class _Stored:
    """What the checkpoint stores of one layer, each part checked when it is taken."""

    name: str
    scheme: Scheme
    tensors: Mapping[str, Tensor]

    def matrix(self) -> Tensor:
        """``[out, in]``: int8 as stored or unpacked, floating for the format dense."""
        if self.scheme.format == "pack-quantized":
            return self._unpacked()
        weight = self._take("weight")
        dense = self.scheme.format == "dense"
        if weight.dim() != 2 or not weight.numel() or weight.dtype not in (FLOATS if dense else (torch.int8,)):
            self._refuse(f"weight is {_described(weight)}, expected {'floating' if dense else 'int8'} [out, in]")
        return weight

    def _unpacked(self) -> Tensor:
        packed, shape = self._take("weight_packed"), self._take("weight_shape").flatten().tolist()
        if len(shape) != 2 or min(shape) < 1:
            self._refuse(f"weight_shape is {shape}, expected [out, in]")
        bits = self.scheme.weights.num_bits
        self._expect("weight_packed", packed, torch.int32, [shape[0], math.ceil(shape[1] * bits / 32)])
        values: Tensor = unpack_from_int32(packed, bits, shape)
        return values

    def scales(self, shape: torch.Size) -> Tensor:
        """``[out, groups]`` in the dtype that they are stored in."""
        scales = self._by_group("weight_scale", self._take("weight_scale"), shape)
        if scales.dtype not in FLOATS:
            self._refuse(f"weight_scale is {_described(scales)}, expected 16 to 64 floating bits")
        if not torch.isfinite(scales).all():
            raise NumericalError(f"{self.name}.weight_scale has values that are not finite")
        return scales

    def zero_points(self, shape: torch.Size) -> Tensor | None:
        """``[out, groups]`` integers in the units of the values, or ``None``."""
        weights = self.scheme.weights
        if weights.symmetric:
            self._expect_zeros("weight_zero_point")
            return None
        zero_points = self._take("weight_zero_point")
        if self.scheme.format == "pack-quantized" and weights.strategy != "tensor":
            out, groups = shape[0], self._n_groups(shape[1])
            rows = math.ceil(out * weights.num_bits / 32)
            self._expect("weight_zero_point", zero_points, torch.int32, [rows, groups])
            # packed down the columns; the library's own way to say so fails for one row of words (0.20.1)
            words = zero_points.T.clone(memory_format=torch.contiguous_format)
            unpacked: Tensor = unpack_from_int32(words, weights.num_bits, torch.Size((groups, out)))
            return unpacked.T
        if zero_points.is_floating_point():
            self._refuse(f"weight_zero_point is {_described(zero_points)}, expected integers")
        return self._by_group("weight_zero_point", zero_points, shape)

    def integers(self, columns: Tensor, scales: Tensor, zero_points: Tensor | None) -> Tensor:
        """int8 ``[out, in]`` within the bits; a dense weight is rounded by the library, as its own forward does."""
        weights = self.scheme.weights
        if columns.is_floating_point():
            columns = quantize(columns, scales, zero_points, weights, torch.int8)
        low, high = -(2 ** (weights.num_bits - 1)), 2 ** (weights.num_bits - 1) - 1
        if not low <= int(columns.min()) <= int(columns.max()) <= high:
            self._refuse(f"weight holds values outside {low}…{high}, the range of {weights.num_bits} bits")
        return columns.to(torch.int8).contiguous()

    def input_order(self, size: int) -> Tensor | None:
        """Columns sorted by group where ``weight_g_idx`` says which group each belongs to; −1 in it: none does."""
        if self.scheme.weights.strategy != "group" or not (self.scheme.ordered or "weight_g_idx" in self.tensors):
            return None
        group_of = self._take("weight_g_idx").long()
        if tuple(group_of.shape) != (size,):
            self._refuse(f"weight_g_idx is {list(group_of.shape)}, expected [{size}]")
        if (group_of == -1).any():
            return None
        length = self.scheme.weights.group_size
        if not torch.equal(group_of.sort().values, torch.arange(size, device=group_of.device) // length):
            self._refuse(f"weight_g_idx does not give each of {self._n_groups(size)} groups {length} inputs")
        order = group_of.argsort(stable=True)
        return None if torch.equal(order, torch.arange(size, device=order.device)) else order

    def input_scale(self) -> Tensor | None:
        """Float32 scalar of static activations."""
        if self.scheme.activations != "int8_static":
            return None
        self._expect_zeros("input_zero_point")
        scale = self._take("input_scale").float()
        if scale.numel() != 1 or not math.isfinite(float(scale)) or float(scale) <= 0:
            self._refuse(f"input_scale is {scale.flatten().tolist()[:3]}, expected one positive number")
        return scale.reshape(())

    def _n_groups(self, size: int) -> int:
        length = self.scheme.weights.group_size if self.scheme.weights.strategy == "group" else size
        if size % length:
            self._refuse(f"groups of {length} do not divide its {size} inputs")
        return size // length

    def _by_group(self, what: str, tensor: Tensor, shape: torch.Size) -> Tensor:
        """``[out, groups]``, whatever the strategy stores."""
        out, groups = shape[0], self._n_groups(shape[1])
        rows = 1 if self.scheme.weights.strategy == "tensor" else out
        matrix = tensor.reshape(-1, 1) if tensor.dim() < 2 else tensor
        if list(matrix.shape) != [rows, groups]:
            self._refuse(f"{what} is {list(tensor.shape)}, expected {[rows, groups]}")
        return matrix.expand(out, groups)

    def _take(self, what: str) -> Tensor:
        if what not in self.tensors:
            self._refuse(f"the checkpoint has no {what}; it has {', '.join(sorted(self.tensors))}")
        return self.tensors[what]

    def _expect(self, what: str, tensor: Tensor, dtype: torch.dtype, shape: list[int]) -> None:
        if tensor.dtype != dtype or list(tensor.shape) != shape:
            self._refuse(f"{what} is {_described(tensor)}, expected {dtype} {shape}")

    def _expect_zeros(self, what: str) -> None:
        if what in self.tensors and bool(self.tensors[what].count_nonzero()):
            self._refuse(f"{what} is not zero, but the config group says symmetric")

    def _refuse(self, fault: str) -> NoReturn:
        raise InvalidRequestError(
            f"compressed-tensors: layer {self.name} (config group {self.scheme.group!r}, {self.scheme.format}): {fault}"
        )


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
