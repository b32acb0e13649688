"""The record between quantizers and kernels.

Every quantizer ends in a :class:`QuantizedWeight`; every kernel executes one. So a new quantizer needs no kernel of
its own, and a new kernel serves all quantizers.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import attrs
import torch
from torch import Tensor

ActivationScheme = Literal["none", "int8_per_token", "int8_per_group", "int8_static"]


@attrs.frozen(eq=False)
class QuantizedWeight:
    """Integers and what maps them back: ``weight ≈ (values − zero_points) · scales``, group by group along a row.

    Args:
        values: ``[out, in]`` int8.
        scales: ``[out, groups]`` float32, finite; ``in`` is a multiple of ``groups``.
        zero_points: ``[out, groups]`` float32 in the units of ``values``; ``None`` for a symmetric weight.
        bits: Bits that a value needs.
        activations: How each row of the input is rounded before the product; always symmetric and to int8.
            ``"none"``: it is used as it is; ``"int8_per_token"``: with a scale of its own; ``"int8_per_group"``: with
            one for each group of inputs; ``"int8_static"``: with ``input_scale``, the same for all.
        input_order: ``[in]`` int64, a permutation: column j of ``values`` multiplies input ``input_order[j]``
            (GPTQ's ``desc_act``). ``None``: column j multiplies input j.
        input_scale: Float32 scalar, positive, for ``"int8_static"``.

    Raises:
        ValueError: Shapes or dtypes that do not fit each other.
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    bits: int = 8
    activations: ActivationScheme = "none"
    input_order: Tensor | None = None
    input_scale: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        if (fault := _fault_of(self)) is not None:
            raise ValueError(f"a quantized weight {list(self.values.shape)}: {fault}")

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return (self.values.shape[0], self.values.shape[1])

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that there are, by the names of the fields."""
        fields = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in fields.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return attrs.evolve(self, **moved)

    def rows(self, first: int, last: int) -> QuantizedWeight:
        """The outputs from ``first`` up to ``last``, as views."""
        zero_points = None if self.zero_points is None else self.zero_points[first:last]
        return attrs.evolve(
            self, values=self.values[first:last], scales=self.scales[first:last], zero_points=zero_points
        )

    def dequantize(self) -> Tensor:
        """``[out, in]`` float32, contiguous; column j multiplies input j."""
        groups = _in_groups(self.values.to(torch.float32, memory_format=torch.contiguous_format), self.group_size)
        if self.zero_points is not None:
            groups = groups - self.zero_points.unsqueeze(-1)
        columns = (groups * self.scales.unsqueeze(-1)).flatten(1)
        return columns if self.input_order is None else columns[:, self.input_order.argsort()]


ROWS_AT_ONCE = 4096
"""Of a weight, where temporary copies in float32 are made: those of a whole output head would be large."""

_TENSORS = ("values", "scales", "zero_points", "input_order", "input_scale")


def _fault_of(weight: QuantizedWeight) -> str | None:
    values, scales, zero_points, order = weight.values, weight.scales, weight.zero_points, weight.input_order
    if values.dtype != torch.int8 or values.dim() != 2:
        return f"values are {values.dtype} with {values.dim()} dimensions, expected int8 [out, in]"
    out, size = values.shape
    if scales.dim() != 2 or scales.shape[0] != out or scales.shape[1] == 0 or size % scales.shape[1]:
        return f"scales {list(scales.shape)}, expected [{out}, groups] with a number of groups that divides {size}"
    if any(part is not None and part.dtype != torch.float32 for part in (scales, zero_points, weight.input_scale)):
        return "scales, zero_points and input_scale are float32"
    if not isinstance(weight.bits, int) or isinstance(weight.bits, bool) or weight.bits not in range(1, 9):
        return f"bits={weight.bits!r}, expected an integer from 1 to 8"
    if weight.activations not in get_args(ActivationScheme):
        return f"activations={weight.activations!r}, expected one of {', '.join(get_args(ActivationScheme))}"
    if zero_points is not None and zero_points.shape != scales.shape:
        return f"zero_points {list(zero_points.shape)}, expected {list(scales.shape)} as the scales"
    if order is not None and (order.dtype != torch.int64 or order.shape != (size,)):
        return f"input_order is {order.dtype} {list(order.shape)}, expected int64 [{size}]"
    if order is not None and order.device.type != "meta" and not torch.equal(order.sort().values, _upto(size, order)):
        return f"input_order is no permutation of 0…{size - 1}"
    if order is not None and weight.activations == "int8_per_group":
        return "input_order with int8_per_group: a group's inputs would not lie together"
    if (weight.input_scale is None) != (weight.activations != "int8_static"):
        return "input_scale goes with activations='int8_static', and with nothing else"
    return None


def _upto(size: int, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _in_groups(matrix: Tensor, group_size: int) -> Tensor:
    """``[out, in]`` to ``[out, groups, group_size]``."""
    return matrix.reshape(matrix.shape[0], -1, group_size)


def quantize_symmetric(weight: Tensor, bits: int = 8, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Round to nearest, symmetric, one scale a group of ``group_size`` inputs (``None``: the whole row).

    Args:
        weight: ``[out, in]``, any floating dtype, finite.

    Returns:
        int8 values ``[out, in]`` and float32 scales ``[out, groups]``; ``|weight − values·scales| ≤ scales/2``.
        A group of zeros gets the scale 1.
    """
    parts = [_round_symmetric(rows, bits, group_size) for rows in torch.split(weight.detach(), ROWS_AT_ONCE)]
    values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, scales


def _round_symmetric(weight: Tensor, bits: int, group_size: int | None) -> tuple[Tensor, Tensor]:
    largest = 2 ** (bits - 1) - 1
    groups = _in_groups(weight.to(torch.float32), group_size or weight.shape[1])
    scales = groups.abs().amax(dim=2) / largest
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (groups / scales.unsqueeze(2)).round_().clamp_(-largest, largest)
    return values.flatten(1).to(torch.int8), scales
