"""A shift of each channel behind a norm, undone by the biases of the layers that consume it.

Outlier Suppression+ (Wei et al. 2023, arXiv 2304.09145, section 4.1; the tool of Quasar's paper does the same): a
channel whose values lie about ``z_j = (max_j + min_j) / 2`` rather than about zero wastes a part of a symmetric range.
The norm subtracts ``z``; what that takes from a layer's output, ``W @ z``, its bias gives back.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quasar.weights.layers import replace_module
from quasar.weights.shifted_norm import ShiftedNorm


def shift_norm(model: nn.Module, name: str, shift: Tensor, scales: Tensor) -> Tensor:
    """Let the norm called ``name`` give ``(y - shift) / scales``, where it gives ``y / scales`` so far.

    Args:
        model: The copy in the making; a norm without a bias is replaced by a :class:`ShiftedNorm`.
        shift: ``[D]`` float32.
        scales: ``[D]`` float32.

    Returns:
        ``[D]`` float32, the shift as it came out in the precision of the norm's parameters.
    """
    norm = model.get_submodule(name)
    weight: Tensor = norm.weight  # type: ignore[assignment]
    old = getattr(norm, "bias", None)
    before = torch.zeros_like(shift) if old is None else old.float()
    bias = (before - shift / scales).to(weight.dtype)
    if old is None:
        replace_module(model, name, ShiftedNorm(norm, bias))
    else:
        norm.bias = nn.Parameter(bias, requires_grad=False)
    return (before - bias.float()) * scales
