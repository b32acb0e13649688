"""The grid that a group of weights is rounded to: a scale and a zero point for each output."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Grid:
    """Which values a group can take: ``(q − zero) · scale`` for the integers q in ``lowest…highest``.

    Args:
        scale: ``[..., 1, out]`` float32, positive.
        zero: ``[..., 1, out]`` float32, integers in ``lowest…highest``.
    """

    scale: Tensor
    zero: Tensor
    lowest: int
    highest: int

    @classmethod
    def of(cls, weights: Tensor, bits: int, *, symmetric: bool) -> Grid:
        """From the least to the largest of the weights ``[..., group, out]`` of each output, and through zero.

        A symmetric grid reaches as far down as up, and its zero is the integer 0. The integers are those of int8,
        which begin half their number below those that GPTQ's code and its checkpoints count from 0.
        """
        half = 2 ** (bits - 1)
        low = weights.amin(dim=-2, keepdim=True).clamp_max_(0)
        high = weights.amax(dim=-2, keepdim=True).clamp_min_(0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = (high - low) / (2 * half - 1)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        zero = torch.zeros_like(scale) if symmetric else (-low / scale).round_() - half
        return cls(scale, zero, -half, half - 1)

    def integers(self, weights: Tensor) -> Tensor:
        """The nearest q of each weight, ``[..., n, out]`` float32."""
        return (weights / self.scale + self.zero).round_().clamp_(self.lowest, self.highest)

    def weights(self, integers: Tensor) -> Tensor:
        """What integers stand for, ``[..., n, out]`` float32."""
        return (integers - self.zero) * self.scale
