"""GPTQ on one layer: against its definition, against rounding to nearest, and where the Hessian is degenerate."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.testing.running import examples
from quasar.weights.record import QuantizedWeight
from quasar_gptq import solver
from quasar_gptq.solver import inverse_factor, quantize_gptq

slow = examples(40)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated_inputs(rows: int, size: int, seed: int) -> torch.Tensor:
    """Inputs as layers have them: correlated, some channels much larger than others."""
    return randn(rows, size, seed=seed) @ randn(size, size, seed=seed + 1) * (randn(size, seed=seed + 2) / 2).exp()


def objective(record: QuantizedWeight, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    """``‖XWᵀ − XŴᵀ‖²``, what GPTQ is to keep small."""
    return float((inputs.double() @ (record.dequantize() - weight).double().T).pow(2).sum())


def by_definition(weight: torch.Tensor, hessian: torch.Tensor, bits: int, group: int, damp: float) -> torch.Tensor:
    """``[out, in]`` in float64, by the update of optimal brain surgeon: no Cholesky factor, no blocks.

    Section 3.1 of the paper: the error of column q over ``[H⁻¹]qq`` goes to the others along row q of ``H⁻¹``, H being
    that of the columns that are left.
    """
    weights, size = weight.double().clone(), weight.shape[1]
    damped = hessian.double() + damp * hessian.double().diagonal().mean() * torch.eye(size, dtype=torch.float64)
    levels = 2**bits - 1
    result = torch.empty_like(weights)
    for q in range(size):
        if q % group == 0:
            part = weights[:, q : q + group]
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale = (high - low) / levels
            zero = (-low / scale).round()
        integers = (weights[:, q] / scale + zero).round().clamp(0, levels)
        result[:, q] = (integers - zero) * scale
        inverse = damped[q:, q:].inverse()
        weights[:, q:] -= torch.outer((weights[:, q] - result[:, q]) / inverse[0, 0], inverse[0])
    return result


@slow
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([(4, 48), (5, 35), (12, 36), (16, 48), (24, 48), (40, 80), (48, 48)]),
    st.integers(0, 999),
)
def test_it_is_the_algorithm_of_the_paper(bits, sizes, seed):
    """Groups smaller and larger than a block, with and without a rest: what the slow definition gives.

    A value on the edge between two integers may fall the other way in float32, and changes what follows in its row.
    (In a symmetric grid the largest weight always lies on one; so that is left to other tests.)
    """
    group, size = sizes
    weight, inputs = randn(6, size, seed=seed), correlated_inputs(2 * size, size, seed)
    hessian = inputs.T @ inputs
    with mock.patch.object(solver, "_BLOCK", 16):
        record = quantize_gptq(weight, hessian, bits=bits, group=group, damp=0.05)
    expected = by_definition(weight, hessian, bits, group, 0.05)
    same_rows = torch.isclose(record.dequantize().double(), expected, rtol=1e-3, atol=1e-4).all(dim=1)
    assert int(same_rows.sum()) >= 4, f"{int(same_rows.sum())} of 6 rows are as defined"
    assert (record.group_size, record.bits, record.input_order) == (group, bits, None)


@slow
@given(st.sampled_from([2, 3, 4]), st.sampled_from([16, 32, 64]), st.booleans(), st.booleans(), st.integers(0, 999))
def test_outputs_are_nearer_than_by_rounding_to_nearest(bits, group, symmetric, act_order, seed):
    """The objective of the paper, for any bits, groups, symmetry and order."""
    weight, inputs = randn(32, 64, seed=seed), correlated_inputs(256, 64, seed)
    options = {"bits": bits, "group": group, "symmetric": symmetric}
    nearest = quantize_gptq(weight, None, **options)
    record = quantize_gptq(weight, inputs.T @ inputs, act_order=act_order, **options)
    assert objective(record, weight, inputs) < objective(nearest, weight, inputs)


@slow
@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from([8, 16, 48]), st.booleans(), st.integers(0, 999))
def test_without_a_hessian_it_rounds_to_nearest_as_the_identity_would(bits, group, symmetric, seed):
    """At most half a step away, within the grid; the same values as with the identity."""
    weight = randn(12, 48, seed=seed)
    record = quantize_gptq(weight, None, bits=bits, group=group, symmetric=symmetric)
    apart = (record.dequantize() - weight).abs()
    step = record.scales.repeat_interleave(group, dim=1)
    # A symmetric grid has one integer fewer above zero: the largest weight may be off by a whole step.
    assert bool((apart <= step * (0.51 if not symmetric else 1.01)).all())
    assert bool(((apart > 0.51 * step).sum(dim=1) <= 48 // group * 2).all())
    identity = quantize_gptq(weight, torch.eye(48), bits=bits, group=group, symmetric=symmetric)
    assert torch.equal(record.values, identity.values)
    assert torch.equal(record.scales, identity.scales)


@slow
@given(st.integers(0, 999))
def test_act_order_begins_with_the_largest_inputs(seed):
    """The order is that of the Hessian's diagonal, and the record maps back to columns in their own places."""
    weight, inputs = randn(16, 64, seed=seed), correlated_inputs(128, 64, seed)
    hessian = inputs.T @ inputs
    record = quantize_gptq(weight, hessian, bits=8, group=16, act_order=True)
    diagonal = hessian.diagonal()[record.input_order]
    assert bool((diagonal.diff() <= 0).all())
    permuted = quantize_gptq(
        weight[:, record.input_order], hessian[record.input_order][:, record.input_order], bits=8, group=16
    )
    assert torch.equal(record.values, permuted.values)
    assert (record.dequantize() - weight).norm() < 0.1 * weight.norm()


@pytest.mark.parametrize("act_order", [False, True])
def test_inputs_that_were_always_zero_keep_their_weights_rounded(act_order):
    """They may be other than zero tomorrow."""
    weight, inputs = randn(16, 32, seed=1), correlated_inputs(64, 32, 2)
    inputs[:, [3, 8, 31]] = 0
    record = quantize_gptq(weight, inputs.T @ inputs, bits=8, group=32, act_order=act_order)
    apart = (record.dequantize() - weight)[:, [3, 8, 31]].abs()
    assert bool((apart <= 0.51 * record.scales).all())
    assert bool((record.scales < 0.1).all())


@pytest.mark.parametrize("hessian", [torch.zeros(32, 32), torch.ones(32, 32), torch.full((32, 32), 1e-30)])
def test_a_hessian_of_rank_zero_or_one_is_no_obstacle(hessian):
    """Values are finite and within the grid."""
    weight = randn(16, 32, seed=1)
    record = quantize_gptq(weight, hessian, bits=4, group=16)
    assert bool(torch.isfinite(record.dequantize()).all())
    assert (record.dequantize() - weight).norm() < 0.6 * weight.norm()


def test_dampening_grows_until_the_factors_exist():
    """With a diagonal of mean 1 and entries far too large beside it, no small share is enough."""
    hessian = torch.full((8, 8), 5.0).fill_diagonal_(1.0)
    factor = inverse_factor(hessian, 0.01)
    assert torch.allclose(factor.T @ factor, (hessian + 10 * torch.eye(8)).inverse(), atol=1e-5)
    assert torch.equal(factor, factor.triu())


def test_the_hessian_s_scale_does_not_matter():
    """Sums over many prompts and over few give the same values."""
    weight, inputs = randn(16, 64, seed=1), correlated_inputs(128, 64, 2)
    hessian = inputs.T @ inputs
    records = [quantize_gptq(weight, hessian * factor, bits=4, group=32) for factor in (1.0, 2.0**40, 2.0**-40)]
    assert all(torch.equal(record.values, records[0].values) for record in records)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_are_computed_with_in_float32(dtype):
    """And neither weight nor Hessian is changed."""
    weight, inputs = randn(16, 64, seed=1).to(dtype), correlated_inputs(128, 64, 2)
    hessian = inputs.T @ inputs
    kept = weight.clone(), hessian.clone()
    record = quantize_gptq(weight, hessian, bits=4, group=32, act_order=True)
    again = quantize_gptq(weight.float(), hessian, bits=4, group=32, act_order=True)
    assert torch.equal(record.values, again.values)
    assert record.scales.dtype == torch.float32
    assert torch.equal(kept[0], weight)
    assert torch.equal(kept[1], hessian)


def test_zeros_and_weights_of_one_sign_are_exact_where_they_can_be():
    """A group of zeros, and grids that reach to zero although no weight does."""
    weight = torch.tensor([[0.0, 0, 0, 0], [3, 6, 9, 15], [-3, -6, -9, -15]])
    record = quantize_gptq(weight, None, bits=4, group=4)
    assert torch.equal(record.dequantize(), weight)
    assert record.zero_points.flatten().tolist() == [-8, -8, 7]
    assert record.scales.flatten().tolist() == [1, 1, 1]


def test_a_symmetric_grid_reaches_as_far_down_as_up():
    """By hand: of 3 bits, −4…3, with a seventh of the whole range as the step; what lies above 3 is cut off."""
    weight = torch.tensor([[3.5, 1.0, -2.0, -3.2], [-7.0, 5.0, 1.0, 0.0]])
    record = quantize_gptq(weight, None, bits=3, group=4, symmetric=True)
    assert record.scales.flatten().tolist() == [1, 2]
    assert record.values.tolist() == [[3, 1, -2, -3], [-4, 2, 0, 0]]
    assert record.zero_points is None
