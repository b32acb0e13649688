"""No quantization: the do-nothing twin of a quantizer. The target is the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


class NoQuantizer:
    """Returns the model it is given."""

    def quantize(self, model: nn.Module, calibration: Sequence[Any] | None = None) -> nn.Module:
        return model

    def describe(self) -> Mapping[str, Any]:
        return {"quantizer": "none"}
