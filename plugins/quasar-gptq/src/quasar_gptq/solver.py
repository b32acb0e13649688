"""GPTQ for one layer (Frantar et al. 2022, arXiv 2210.17323, section 3 and algorithm 1).

The weights of one input after the other are rounded. The error of each is made up for by the inputs whose weights are
not rounded yet, as far as they can: what is kept small is ``‖XW − XŴ‖``, over the inputs X that the layer had. All
that this needs of X is the Hessian ``H = XᵀX``: how much of an error goes where stands in the rows of the upper
Cholesky factor U of ``H⁻¹``.

Weights are ``[in, out]`` here, transposed, so that those of one input lie together. Two departures from the authors'
code: blocks begin where groups begin, so that the scale of a group is found when everything before it has been made
up for; and an input that was always zero keeps its weights, rounded to nearest, where their code sets them to zero,
which is right only for as long as the input stays zero.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quasar.weights.record import ActivationScheme, QuantizedWeight
from quasar_gptq.grid import Grid

_BLOCK = 128
"""Inputs whose errors are passed on together to all that follow (B in the paper)."""


def quantize_gptq(
    weight: Tensor,
    hessian: Tensor | None,
    *,
    bits: int,
    group: int,
    symmetric: bool = False,
    act_order: bool = False,
    damp: float = 0.1,
    activations: ActivationScheme = "none",
) -> QuantizedWeight:
    """Round an ``[out, in]`` weight.

    Args:
        weight: Any floating dtype, finite; not changed.
        hessian: ``[in, in]`` float32, ``XᵀX`` up to a factor, finite; not changed. ``None``: the identity, with which
            every weight is rounded to nearest.
        bits: 2 to 8.
        group: Inputs that share a scale; divides ``in``.
        symmetric: Without zero points.
        act_order: Begin with the inputs that were largest; groups are made in that order, which is the record's
            ``input_order``.
        damp: Share of the mean of H's diagonal that is added to the diagonal; tenfold as often as the Cholesky
            factors do not exist otherwise.
        activations: For the record.
    """
    weights, order = weight.detach().float().T.clone(memory_format=torch.contiguous_format), None
    if hessian is None:
        values, scales, zeros = _round_to_nearest(weights, bits, group, symmetric)
    else:
        hessian = _normalised(hessian)
        if act_order:
            order = hessian.diagonal().argsort(descending=True, stable=True)
            weights, hessian = weights[order], hessian[order][:, order]
        values, scales, zeros = _solve(weights, inverse_factor(hessian, damp), bits, group, symmetric)
    values, scales, zeros = (tensor.T.contiguous() for tensor in (values, scales, zeros))
    zero_points = None if symmetric else zeros
    return QuantizedWeight(values, scales, zero_points, bits=bits, activations=activations, input_order=order)


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """The upper triangular U with ``UᵀU = (H + damp · I)⁻¹``, ``[in, in]``, of an H whose diagonal has the mean 1."""
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damp)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damp *= 10


def _normalised(hessian: Tensor) -> Tensor:
    """H divided by the mean of its diagonal, over inputs that were not always zero; the others get a 1 there."""
    diagonal = hessian.diagonal()
    alive = diagonal > 0
    mean = float(diagonal[alive].double().mean()) if bool(alive.any()) else 1.0
    hessian = hessian / mean
    hessian.diagonal()[~alive] = 1.0
    return hessian


def _blocks(size: int, group: int) -> Iterator[tuple[int, int]]:
    """First input of each block, and the one after its last: some whole groups, or a piece of one large group."""
    span = max(group, _BLOCK // group * group)
    for start in range(0, size, span):
        stop = min(start + span, size)
        for first in range(start, stop, _BLOCK):
            yield first, min(first + _BLOCK, stop)


def _solve(weights: Tensor, factor: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 1. Uses up ``weights``; returns int8 ``[in, out]``, and scales and zero points ``[groups, out]``."""
    values = torch.empty_like(weights, dtype=torch.int8)
    scales, zeros = (weights.new_empty((weights.shape[0] // group, weights.shape[1])) for _ in range(2))
    for first, last in _blocks(weights.shape[0], group):
        errors = torch.empty_like(weights[first:last])
        for i in range(first, last):
            if i % group == 0:
                grid = Grid.of(weights[i : i + group], bits, symmetric=symmetric)
                scales[i // group], zeros[i // group] = grid.scale[0], grid.zero[0]
            row = weights[i : i + 1]
            integers = grid.integers(row)
            values[i] = integers[0]
            error = (row - grid.weights(integers)) / factor[i, i]
            weights[i + 1 : last].addmm_(factor[i, i + 1 : last, None], error, alpha=-1)
            errors[i - first] = error[0]
        weights[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return values, scales, zeros


def _round_to_nearest(weights: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What :func:`_solve` makes of the identity, all groups at once."""
    groups = weights.reshape(-1, group, weights.shape[1])
    grid = Grid.of(groups, bits, symmetric=symmetric)
    return grid.integers(groups).to(torch.int8).flatten(0, 1), grid.scale[:, 0], grid.zero[:, 0]
