"""The oracle of all kernels: plain arithmetic on any device, slow."""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.weights.activations import quantize_inputs, round_inputs
from quasar.weights.record import QuantizedWeight


class ReferenceKernel:
    """Executes every weight by the definition of :class:`QuantizedWeight`, without a claim to speed."""

    speed = 0

    def refuses(self, weight: QuantizedWeight) -> str | None:
        return None

    def prepare(self, weight: QuantizedWeight) -> ReferenceExecutor:
        return ReferenceExecutor(weight)


class ReferenceExecutor:
    """Products in float64, where integers times integers are exact.

    Other products are summed in an order that may depend on the width, 29 bits below what float32 can show.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        self.weight = weight

    def __call__(self, inputs: Tensor) -> Tensor:
        weight, rows = self.weight, inputs.to(torch.float32)
        if weight.activations in ("none", "int8_per_group"):
            return (round_inputs(rows, weight).double() @ weight.dequantize().double().T).to(inputs.dtype)
        groups, row_scales = quantize_inputs(rows, weight)
        integers = groups.squeeze(-2)
        if weight.group_size < weight.shape[1] or weight.zero_points is not None or weight.input_order is not None:
            outputs = (integers.double() @ weight.dequantize().double().T).to(torch.float32)
        else:
            products = integers.double() @ weight.values.double().T
            outputs = products.to(torch.float32) * weight.scales[:, 0]
        return (outputs * row_scales.squeeze(-1)).to(inputs.dtype)
