"""The record between quantizers and kernels.

Every quantizer ends in a :class:`QuantizedWeight`; every kernel executes one. So a new quantizer needs no kernel of
its own, and a new kernel serves all quantizers.
"""

from __future__ import annotations

from typing import Literal

import attrs
import torch
from torch import Tensor

ActivationScheme = Literal["none", "int8_per_token"]


@attrs.frozen(eq=False)
class QuantizedWeight:
    """Integers and what maps them back: ``weight ≈ (values − zero_points) · scales``, group by group along a row.

    Args:
        values: ``[out, in]`` int8.
        scales: ``[out, groups]`` float32, positive; ``in`` is a multiple of ``groups``.
        zero_points: ``[out, groups]`` in the units of ``values``; ``None`` for a symmetric weight.
        bits: Bits that a value needs; symmetric values lie in ``±(2**(bits-1) - 1)``.
        activations: ``"int8_per_token"``: each row of the input is rounded to symmetric int8 with a scale of its own
            before the product; ``"none"``: the input is used as it is.
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None = None
    bits: int = 8
    activations: ActivationScheme = "none"

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return (self.values.shape[0], self.values.shape[1])

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.values, self.scales, self.zero_points)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def dequantize(self) -> Tensor:
        """``[out, in]`` float32."""
        groups = _in_groups(self.values.to(torch.float32), self.group_size)
        if self.zero_points is not None:
            groups = groups - self.zero_points.unsqueeze(-1)
        return (groups * self.scales.unsqueeze(-1)).flatten(1)


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
    largest = 2 ** (bits - 1) - 1
    groups = _in_groups(weight.detach().to(torch.float32), group_size or weight.shape[1])
    scales = groups.abs().amax(dim=2) / largest
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (groups / scales.unsqueeze(2)).round_().clamp_(-largest, largest)
    return values.flatten(1).to(torch.int8), scales
