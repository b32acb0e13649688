"""Weights of few bits with activations as they are: mapped back once, then multiplied in floating point.

As fast as the full model, and it needs 4 bytes a weight beside the record: what a few bits save in memory traffic, only
a compiled kernel can turn into speed on a CPU. It is many times as fast as mapping the weight back at each call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.kernels.blocks import product_in_blocks
from quasar.quantizers.weight import QuantizedWeight


class DenseKernel:
    """Executes weights of any bits, groups and zero points whose activations are not quantized."""

    speed = 5

    def refuses(self, weight: QuantizedWeight) -> str | None:
        return None if weight.activations == "none" else "takes activations as they are"

    def prepare(self, weight: QuantizedWeight) -> DenseExecutor:
        return DenseExecutor(weight)


class DenseExecutor:
    """Products in float32, in blocks of rows."""

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight
        self._dense = weight.dequantize()

    def __call__(self, inputs: Tensor) -> Tensor:
        return product_in_blocks(inputs.to(torch.float32), self._dense).to(inputs.dtype)
