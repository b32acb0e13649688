"""How ``w8a8`` rounds one layer: 8-bit weights and 8-bit activations, in groups or not, static or not."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from quasar.weights.record import QuantizedWeight, quantize_symmetric


@attrs.frozen
class Int8Scheme:
    """Symmetric int8 on both sides of a product.

    Args:
        group: Inputs that share a scale; −1: all of them, so one scale an output channel and one a token.
        static: Activations are rounded with one scale a layer, from calibration, instead of scales of their own.
    """

    group: int = -1
    static: bool = False

    def record(self, weight: Tensor, peak: Tensor | None = None) -> QuantizedWeight:
        """Round an ``[out, in]`` weight to nearest.

        Args:
            peak: Float32 scalar, the largest absolute input; for static activations, which it scales.
        """
        size = None if self.group == -1 else self.group
        values, scales = quantize_symmetric(weight, bits=8, group_size=size)
        if self.static:
            assert peak is not None
            scale = torch.where(peak > 0, peak / 127, torch.ones_like(peak))
            return QuantizedWeight(values, scales, activations="int8_static", input_scale=scale)
        return QuantizedWeight(values, scales, activations="int8_per_token" if size is None else "int8_per_group")
