"""The two searches of AWQ (Lin et al. 2023, arXiv 2306.00978): scales of channels (section 3.2), and clipping.

Both minimise the squared error of a layer's outputs over a sample ``X`` of its inputs, ``‖X (Q(W) − W)ᵀ‖²``. It depends
on ``X`` through the triangle of its QR decomposition alone, which has at most as many rows as columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasar_awq.rounding import Grid

_ELEMENTS = 2**22
"""Weights that are tried at once. Rows are independent of each other, so memory need not grow with the layer."""
_FLOOR = 1e-4
"""Smallest magnitude of a channel as a share of the largest, lest a channel that is silent in the sample be scaled
without bound."""


def candidate_scales(magnitudes: Tensor, steps: int) -> Tensor:
    """``[1 + steps, in]``: no scaling, then ``magnitudes ** a`` for ``a = 1/steps … 1`` (the paper's eq. 5).

    Their geometric middle is 1; a common factor changes no rounding.

    Args:
        magnitudes: ``[in]``, mean absolute inputs.
    """
    base = magnitudes.clamp_min(float(magnitudes.amax()) * _FLOOR)
    if float(base.amax()) == 0:
        return torch.ones_like(base).expand(1 + steps, -1)
    exponents = torch.arange(1 + steps, dtype=torch.float32, device=base.device) / max(steps, 1)
    scales = base.unsqueeze(0).pow(exponents.unsqueeze(1))
    return scales / (scales.amax(dim=1, keepdim=True) * scales.amin(dim=1, keepdim=True)).sqrt()


def scaling_errors(weights: Sequence[Tensor], inputs: Tensor, candidates: Tensor, grid: Grid) -> Tensor:
    """Squared error of the outputs for each candidate, ``[candidates]`` float64.

    Args:
        weights: ``[out, in]`` of each layer that consumes the input.
        inputs: ``[n, in]``.
        candidates: ``[candidates, in]``: columns are multiplied by it before they are rounded, inputs divided.
    """
    triangle = torch.linalg.qr(inputs.float(), mode="r").R
    errors = torch.zeros(len(candidates), dtype=torch.float64, device=inputs.device)
    for weight in weights:
        for rows in weight.split(max(1, _ELEMENTS // weight.shape[1])):
            full = rows.float()
            for i, scales in enumerate(candidates):
                change = grid.nearest(full * scales).div_(scales).sub_(full)
                errors[i] += (change @ triangle.T).pow_(2).sum(dtype=torch.float64)
    return errors


def best_scales(weights: Sequence[Tensor], inputs: Tensor, grid: Grid, steps: int) -> Tensor:
    """``[in]`` float32: of the candidates, the one with the smallest error of the layers' outputs together."""
    candidates = candidate_scales(inputs.float().abs().mean(dim=0), steps)
    return candidates[int(scaling_errors(weights, inputs, candidates, grid).argmin())]


def clip(weight: Tensor, inputs: Tensor, grid: Grid, steps: int) -> Tensor:
    """Clamp each group of a row to the limit with which its part of the output has the smallest error.

    Args:
        weight: ``[out, in]`` float32.
        inputs: ``[n, in]``, what it is multiplied with.
        steps: Limits from the largest absolute value of the group, which clamps nothing, down to half of it.
    """
    length = grid.length(weight.shape[1])
    by_group = inputs.float().unflatten(1, (-1, length)).transpose(0, 1)  # [groups, n, length]
    triangles = torch.linalg.qr(by_group, mode="r").R
    chunks = weight.split(max(1, _ELEMENTS // weight.shape[1]))
    return torch.cat([_clip_rows(rows, triangles, grid, steps) for rows in chunks])


def _clip_rows(rows: Tensor, triangles: Tensor, grid: Grid, steps: int) -> Tensor:
    groups: Tensor = rows.unflatten(1, (triangles.shape[0], -1))  # [out, groups, length]
    largest = groups.abs().amax(dim=2, keepdim=True)
    best, smallest = largest, torch.full_like(largest, float("inf"))
    for i in range(1 + steps):
        limit = largest * (1 - 0.5 * i / max(steps, 1))
        clamped = groups.clamp(-limit, limit)
        change = grid.nearest(clamped.flatten(1)).unflatten(1, groups.shape[1:]) - groups
        errors = (change.transpose(0, 1) @ triangles.mT).pow_(2).sum(dim=2).T.unsqueeze(2)
        better = errors < smallest
        best, smallest = torch.where(better, limit, best), torch.where(better, errors, smallest)
    return groups.clamp(-best, best).flatten(1)
