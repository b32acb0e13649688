"""Quantization of activations, row by row, shared by all kernels that need it."""

from __future__ import annotations

from torch import Tensor

from quasar.weights.record import QuantizedWeight


def quantize_rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8, one scale a row, so that a row's integers do not depend on the rows beside it.

    Args:
        inputs: ``[..., in]`` float32.

    Returns:
        Integers in −127…127 as float32 ``[..., in]``, and float32 scales ``[..., 1]``. A row of zeros stays zeros.
    """
    scales = inputs.abs().amax(dim=-1, keepdim=True).div_(127).clamp_min_(1e-30)
    return (inputs / scales).round_(), scales


def quantize_with(scale: Tensor, inputs: Tensor) -> Tensor:
    """Symmetric int8 with a fixed scale: integers in −127…127 as float32; what lies beyond is cut off."""
    return (inputs / scale).round_().clamp_(-127, 127)


def quantize_inputs(inputs: Tensor, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Round inputs as ``weight.activations`` says, which is not ``"none"``.

    Args:
        inputs: ``[..., in]`` float32.

    Returns:
        Integers in −127…127 as float32, ``[..., groups, in / groups]``, and what broadcasts with them: their scales.
        There is one group but for ``"int8_per_group"``.
    """
    n_groups = weight.scales.shape[1] if weight.activations == "int8_per_group" else 1
    groups = inputs.reshape(*inputs.shape[:-1], n_groups, inputs.shape[-1] // n_groups)
    if weight.input_scale is None:
        return quantize_rows(groups)
    return quantize_with(weight.input_scale, groups), weight.input_scale


def round_inputs(inputs: Tensor, weight: QuantizedWeight) -> Tensor:
    """``[..., in]`` float32 inputs as the product sees them: rounded as ``weight.activations`` says."""
    if weight.activations == "none":
        return inputs
    integers, scales = quantize_inputs(inputs, weight)
    return (integers * scales).flatten(-2)
