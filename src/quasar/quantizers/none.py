"""No quantization: the do-nothing twin of a quantizer. The target is the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from quasar.types import Quantized


class NoQuantizer:
    """Makes of a model that model itself."""

    def quantize(self, model: nn.Module, calibration: Sequence[Any] | None = None) -> Quantized:
        return Quantized(model, self.describe())

    def describe(self) -> Mapping[str, Any]:
        return {"quantizer": "none"}
