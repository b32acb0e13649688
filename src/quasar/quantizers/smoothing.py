"""Smoothing: move the spread of activations into the weights, where it costs nothing.

SmoothQuant (Xiao et al. 2023, arXiv 2211.10438, eq. 4): channel j of a linear layer's input is divided by
``s_j = max|X_j|**alpha / max|W_j|**(1 - alpha)`` and column j of its weight multiplied by it, which changes nothing
but how well both can be rounded. The division is folded into whatever makes the input: the norm (as the paper's tool
does), or the rows of the up projection, where a scale for each output channel takes it without loss.

Behind a norm, each channel may also be shifted before it is divided (see :mod:`quasar.quantizers.w8a8.shifting`).
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn

from quasar.quantizers.tracing import Group


@attrs.define(eq=False)
class Fold:
    """What smoothing does to one layer: ``rows[:, None]`` and ``columns`` multiply its weight.

    Args:
        rows: ``[out]``, what its outputs are multiplied by.
        columns: ``[in]``, what its inputs are divided by.
        shift: ``[in]``, what is subtracted from its inputs before; its bias makes up for it.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    shift: Tensor | None = None

    def apply(self, weight: Tensor) -> Tensor:
        """``[out, in]`` to ``[out, in]``, float32."""
        weight = weight.float()
        if self.rows is not None:
            weight = weight * self.rows.unsqueeze(1)
        return weight if self.columns is None else weight * self.columns

    def apply_to_bias(self, bias: Tensor | None, weight: Tensor | None = None) -> Tensor | None:
        """``[out]`` to ``[out]``, same dtype; where inputs are shifted, a layer without a bias gets one.

        Args:
            weight: ``[out, in]``, the layer's own; needed where inputs are shifted.
        """
        if self.shift is not None:
            assert weight is not None
            lacking = weight.float() @ self.shift
            bias = lacking.to(weight.dtype) if bias is None else (bias.float() + lacking).to(bias.dtype)
        return bias if bias is None or self.rows is None else (bias * self.rows).to(bias.dtype)


def smoothing_scales(group: Group, alpha: float, peaks: Tensor | None = None) -> Tensor:
    """``s``, ``[in]`` float32; 1 for a channel that is always zero.

    Args:
        peaks: ``[in]``, the largest absolute inputs; ``None``: the group's own, which no shift has moved.
    """
    peaks = group.peaks if peaks is None else peaks
    assert peaks is not None
    columns = [layer.weight.abs().amax(dim=0).float() for layer in group.consumers.values()]
    weight_peaks = torch.stack(columns).amax(dim=0)
    scales = peaks.pow(alpha) / weight_peaks.pow(1 - alpha)
    return torch.where((scales > 0) & scales.isfinite(), scales, torch.ones_like(scales))


def divide_norm(norm: nn.Module, scales: Tensor) -> bool:
    """Give ``norm`` new parameters with which its output is divided by ``scales``; ``False`` if it has no such form.

    Two forms are tried and the result is checked by running the norm: output proportional to ``weight`` (Llama,
    LayerNorm), and to ``1 + weight`` (Gemma).
    """
    weight: Tensor = norm.weight  # type: ignore[assignment]
    bias: Tensor | None = getattr(norm, "bias", None)
    probe = torch.randn(
        (4, weight.shape[0]), dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0)
    ).to(weight)
    expected = norm(probe).float() / scales
    for divided in (weight.float() / scales, (1 + weight.float()) / scales - 1):
        norm.weight = nn.Parameter(divided.to(weight.dtype), requires_grad=False)
        if bias is not None:
            norm.bias = nn.Parameter((bias.float() / scales).to(bias.dtype), requires_grad=False)
        if torch.allclose(norm(probe).float(), expected, rtol=8 * torch.finfo(weight.dtype).eps, atol=1e-6):
            return True
    norm.weight, norm.bias = weight, bias  # type: ignore[assignment]
    return False
