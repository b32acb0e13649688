"""Any quantized weight, mapped back once and multiplied in floating point, its inputs rounded as it asks.

As fast as the full model, and it needs 4 bytes a weight beside the record: what a few bits save in memory traffic, only
a compiled kernel can turn into speed on a CPU. It is many times as fast as mapping the weight back at each call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.weights.activations import round_inputs
from quasar.weights.products import product_in_panels
from quasar.weights.record import QuantizedWeight


class DenseKernel:
    """Executes every weight: any bits, groups, zero points and rounding of activations."""

    speed = 5

    def refuses(self, weight: QuantizedWeight) -> str | None:
        return None

    def prepare(self, weight: QuantizedWeight) -> DenseExecutor:
        return DenseExecutor(weight)


class DenseExecutor:
    """Products in float32, in panels of rows."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight
        self._dense = weight.dequantize()

    def __call__(self, inputs: Tensor) -> Tensor:
        rows = round_inputs(inputs.to(torch.float32), self.weight)
        return product_in_panels(rows, self._dense).to(inputs.dtype)
