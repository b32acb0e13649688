"""The smoothing strength of each group, found by trying: the one with which the consumers' outputs err least.

The paper's tool searches each group's scale too; how is not published. Here the search is over SmoothQuant's one
parameter, on inputs sampled from the calibration prompts, with the rounding that the kernels will do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.quantizers.smoothing import smoothing_scales
from quasar.quantizers.tracing import Group
from quasar.quantizers.w8a8.scheme import Int8Scheme
from quasar.weights.activations import round_inputs

ALPHAS = tuple(step / 10 for step in range(11))
SAMPLED_ROWS = 128
"""Inputs of each group that the search sees, of all prompts together."""


def output_error(group: Group, scales: Tensor, scheme: Int8Scheme, shift: Tensor | None = None) -> float:
    """Squared error of the consumers' outputs as a share of their squares, summed over the consumers.

    Args:
        group: With sampled inputs.
        scales: ``[in]``, what divides the inputs and multiplies the columns.
        scheme: How both are rounded.
        shift: ``[in]``, what is subtracted from the inputs before.
    """
    assert group.range is not None
    rows = group.sampled_inputs()
    rows = (rows if shift is None else rows - shift) / scales
    peak = group.range.moved(shift, scales).peaks.amax()
    total = 0.0
    for layer in group.consumers.values():
        weight = layer.weight.float() * scales
        record = scheme.record(weight, peak)
        exact = rows @ weight.T
        change = round_inputs(rows, record) @ record.dequantize().T - exact
        total += float(change.square().sum() / exact.square().sum().clamp_min(1e-30))
    return total


def searched_scales(group: Group, scheme: Int8Scheme, shift: Tensor | None = None) -> Tensor:
    """``[in]``: of the scales that :data:`ALPHAS` give, those with the smallest :func:`output_error`."""
    assert group.range is not None
    peaks = group.range.moved(shift, None).peaks
    candidates = [smoothing_scales(group, alpha, peaks) for alpha in ALPHAS]
    errors = torch.tensor(
        [output_error(group, scales, scheme, shift) for scales in candidates], dtype=torch.float32, device="cpu"
    )
    return candidates[int(errors.nan_to_num(torch.inf).argmin())]
