"""The grid that weights are rounded to, group by group along a row."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quasar.weights.record import ActivationScheme, QuantizedWeight, quantize_symmetric


@attrs.frozen
class Grid:
    """Integers of ``bits`` bits, with a scale and a zero point for each group of inputs.

    Args:
        bits: Of a value.
        group: Inputs that share a scale; −1: the whole row.
        symmetric: Whether the zero point is 0 everywhere; the lowest integer is then not used.
    """

    bits: int
    group: int
    symmetric: bool

    def length(self, size: int) -> int:
        """Inputs in a group of a row of ``size``."""
        return size if self.group == -1 else self.group

    def record(self, weight: Tensor, activations: ActivationScheme) -> QuantizedWeight:
        """Round ``[out, in]``, float32, to nearest.

        Integers and zero points are moved down by half their range, so that 8 bits fit int8.
        """
        if self.symmetric:
            values, scales = quantize_symmetric(weight, self.bits, self.length(weight.shape[1]))
            return QuantizedWeight(values, scales, bits=self.bits, activations=activations)
        integers, scales, zeros = self._asymmetric(weight)
        middle = 2 ** (self.bits - 1)
        values = (integers - middle).flatten(1).to(torch.int8)
        return QuantizedWeight(
            values, scales.squeeze(2), zeros.squeeze(2) - middle, bits=self.bits, activations=activations
        )

    def nearest(self, weight: Tensor) -> Tensor:
        """``[out, in]`` to the nearest that the grid has, the same as :meth:`record` maps back to; float32."""
        if self.symmetric:
            values, scales = quantize_symmetric(weight, self.bits, self.length(weight.shape[1]))
            groups: Tensor = values.unflatten(1, (scales.shape[1], -1))
            return (groups * scales.unsqueeze(2)).flatten(1)
        integers, scales, zeros = self._asymmetric(weight)
        return integers.sub_(zeros).mul_(scales).flatten(1)

    def _asymmetric(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Integers from 0 as floats ``[out, groups, length]``, scales and zero points ``[out, groups, 1]``.

        Zero is on the grid, as a group that lies on one side of it would else need a zero point out of range.
        """
        highest = 2**self.bits - 1
        groups = weight.unflatten(1, (-1, self.length(weight.shape[1])))
        low = groups.amin(dim=2, keepdim=True).clamp_(max=0)
        high = groups.amax(dim=2, keepdim=True).clamp_(min=0)
        scales = (high - low) / highest
        scales = torch.where(scales > 0, scales, torch.ones_like(scales))
        zeros = (-low / scales).round_()
        return (groups / scales).round_().add_(zeros).clamp_(0, highest), scales, zeros
