"""Per-token (row) quantization of activations, shared by all kernels that need it."""

from __future__ import annotations

from torch import Tensor


def quantize_rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8, one scale a row, so that a row's integers do not depend on the rows beside it.

    Args:
        inputs: ``[..., in]`` float32.

    Returns:
        Integers in −127…127 as float32 ``[..., in]``, and float32 scales ``[..., 1]``. A row of zeros stays zeros.
    """
    scales = inputs.abs().amax(dim=-1, keepdim=True).div_(127).clamp_min_(1e-30)
    return (inputs / scales).round_(), scales
