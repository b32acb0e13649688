"""The searches: their objective is the error of the outputs, and what they choose is never worse than not choosing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.errors import NumericalError
from quasar.testing.models import random_prompt, tiny
from quasar.testing.running import examples
from quasar.weights.layers import linear_layers
from quasar_awq.rounding import Grid
from quasar_awq.samples import Reservoir, sample_in_turns, sample_inputs
from quasar_awq.scores import score_layers
from quasar_awq.search import best_scales, candidate_scales, clip, scaling_errors

CALIBRATION = [torch.tensor([random_prompt(40, seed=seed)]) for seed in (7, 8)]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grids(groups=(4, 8, -1)) -> st.SearchStrategy[Grid]:
    return st.builds(Grid, st.sampled_from([8, 4, 3]), st.sampled_from(groups), st.booleans())


def spread_inputs(n: int, size: int, seed: int) -> torch.Tensor:
    """Rows in which some channels are far larger than others, as activations are."""
    return randn(n, size, seed=seed) * randn(size, seed=seed + 1).mul(1.5).exp()


def error(weight: torch.Tensor, other: torch.Tensor, inputs: torch.Tensor) -> float:
    """Squared error of the outputs, computed as it is defined."""
    return float((inputs.double() @ (other.double() - weight.double()).T).pow(2).sum())


def after(weight: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The weight that outputs see whose columns were scaled, rounded, and scaled back by the inputs."""
    return grid.record(weight * scales, "none").dequantize() / scales


# Rounding


@examples(60)
@given(grids(), st.integers(0, 999), st.sampled_from([0.0, 3.0, -3.0]))
def test_what_a_search_tries_is_what_the_record_maps_back_to(grid, seed, shift):
    """Rounded to the nearest of the grid, integers within their bits, zero exact; also for groups of one sign."""
    weight = randn(5, 16, seed=seed) + shift
    weight[0] = 0
    record = grid.record(weight, "none")
    nearest = record.dequantize()
    torch.testing.assert_close(grid.nearest(weight), nearest, rtol=1e-6, atol=1e-6)
    steps = record.scales.repeat_interleave(record.group_size, 1)
    assert ((nearest - weight).abs() <= steps * (1 if shift else 0.5) * 1.0001).all()
    assert torch.equal(nearest[0], torch.zeros(16))
    half = 2 ** (grid.bits - 1)
    assert -half <= int(record.values.min())
    assert int(record.values.max()) < half
    assert (record.zero_points is None) == grid.symmetric
    if record.zero_points is not None:
        assert torch.equal(record.zero_points, record.zero_points.round().clamp(-half, half - 1))


def test_a_group_is_rounded_as_worked_out_by_hand():
    """3 bits: from −1 to 2.5 in 7 steps of 0.5, with the zero point 2."""
    record = Grid(3, 4, False).record(torch.tensor([[-1.0, 0.2, 0.3, 2.5]]), "none")
    assert record.scales.tolist() == [[0.5]]
    assert record.zero_points.tolist() == [[2 - 4]]
    assert record.values.tolist() == [[0 - 4, 2 - 4, 3 - 4, 7 - 4]]
    assert record.dequantize().tolist() == [[-1.0, 0.0, 0.5, 2.5]]


# Scales


@examples(60)
@given(grids(), st.integers(1, 40), st.integers(0, 999))
def test_the_searched_scale_is_never_worse_than_no_scaling(grid, n, seed):
    """On the objective: the squared error of the outputs of all layers that share the input."""
    weights, inputs = [randn(6, 16, seed=seed), randn(3, 16, seed=seed + 1)], spread_inputs(n, 16, seed + 2)
    scales = best_scales(weights, inputs, grid, 8)
    searched = sum(error(weight, after(weight, scales, grid), inputs) for weight in weights)
    plain = sum(error(weight, grid.record(weight, "none").dequantize(), inputs) for weight in weights)
    assert searched <= plain * 1.001 + 1e-9


@examples(30)
@given(grids(), st.sampled_from([3, 16, 40]), st.integers(0, 999))
def test_the_objective_is_the_error_of_the_outputs(grid, n, seed):
    """For fewer rows than channels and more, over several layers, whatever the number of rows tried at once."""
    weights, inputs = [randn(6, 16, seed=seed), randn(3, 16, seed=seed + 1)], spread_inputs(n, 16, seed + 2)
    candidates = candidate_scales(inputs.abs().mean(dim=0), 5)
    expected = [sum(error(w, after(w, scales, grid), inputs) for w in weights) for scales in candidates]
    measured = scaling_errors(weights, inputs, candidates, grid)
    torch.testing.assert_close(measured, torch.tensor(expected, dtype=torch.float64), rtol=1e-3, atol=1e-6)
    best = best_scales(weights, inputs, grid, 5)
    assert sum(error(w, after(w, best, grid), inputs) for w in weights) <= min(expected) * 1.001 + 1e-9


def test_rows_that_are_tried_in_pieces_give_the_same(monkeypatch):
    """Memory does not grow with the layer."""
    weight, inputs, grid = randn(50, 16, seed=1), spread_inputs(30, 16, 2), Grid(3, 8, False)
    candidates = candidate_scales(inputs.abs().mean(dim=0), 5)
    whole = scaling_errors([weight], inputs, candidates, grid), clip(weight, inputs, grid, 10)
    monkeypatch.setattr("quasar_awq.search._ELEMENTS", 7 * 16)
    pieces = scaling_errors([weight], inputs, candidates, grid), clip(weight, inputs, grid, 10)
    torch.testing.assert_close(whole, pieces)


def test_the_candidates_are_powers_of_the_magnitudes():
    """No scaling first; exponents up to 1; the middle of the range is 1, for the sake of half precision."""
    magnitudes = torch.tensor([1.0, 4.0, 16.0])
    expected = torch.tensor([[1.0, 1.0, 1.0], [0.5, 1.0, 2.0], [0.25, 1.0, 4.0]])
    torch.testing.assert_close(candidate_scales(magnitudes, 2), expected)
    assert torch.equal(candidate_scales(magnitudes, 0), torch.ones(1, 3))


def test_a_channel_that_is_silent_in_the_sample_is_scaled_within_bounds():
    """Neither infinite nor zero; and where all are silent nothing is scaled."""
    silent = candidate_scales(torch.tensor([0.0, 1.0, 2.0]), 4)
    assert torch.isfinite(silent).all()
    assert float((silent.amax(1) / silent.amin(1)).max()) <= 1.001e4
    assert torch.equal(candidate_scales(torch.zeros(3), 4), torch.ones(5, 3))


def test_a_channel_with_large_inputs_is_scaled_up():
    """Its weight is small beside those of its group and would be rounded away."""
    weight = torch.tensor([[0.3, 5.0, -4.0, 3.3]])
    inputs = torch.tensor([[20.0, 0.1, 0.1, 0.1], [-30.0, 0.1, -0.1, 0.2]])
    grid = Grid(3, 4, False)
    scales = best_scales([weight], inputs, grid, 20)
    assert scales[0] > 2 * scales[1:].max()
    rounded = error(weight, grid.record(weight, "none").dequantize(), inputs)
    assert error(weight, after(weight, scales, grid), inputs) < rounded / 10


# Clipping


@examples(40)
@given(grids(), st.sampled_from([2, 8, 40]), st.integers(0, 999))
def test_each_group_gets_the_best_of_the_limits_that_are_tried(grid, n, seed):
    """Compared with trying all of them one group of one row at a time, by outputs; so it is never worse than none."""
    weight, inputs = randn(4, 16, seed=seed) ** 3, spread_inputs(n, 16, seed + 1)
    clipped = clip(weight, inputs, grid, 10)
    length = grid.length(16)
    for row in range(4):
        for begin in range(0, 16, length):
            part, seen = weight[row : row + 1, begin : begin + length], inputs[:, begin : begin + length]
            limits = [float(part.abs().max()) * (1 - 0.05 * i) for i in range(11)]
            tried = [error(part, grid.nearest(part.clamp(-limit, limit)), seen) for limit in limits]
            chosen = error(part, grid.nearest(clipped[row : row + 1, begin : begin + length]), seen)
            assert chosen <= min(tried) * 1.001 + 1e-6


def test_a_weight_that_no_input_needs_is_clipped_and_nothing_is_where_nothing_is_tried():
    """An outlier whose channel is silent makes the grid coarse for nothing; without steps the weight is kept."""
    weight, grid = torch.tensor([[9.0, 1.0, -0.4, 0.3]]), Grid(3, 4, False)
    inputs = torch.tensor([[0.0, 1.0, 1.0, -1.0], [0.0, 2.0, -1.0, 1.0]])
    clipped = clip(weight, inputs, grid, 20)
    assert clipped[0, 0] <= 6
    assert torch.equal(clipped[0, 1:], weight[0, 1:])
    assert torch.equal(clip(weight, inputs, grid, 0), weight)


# Samples


@examples(40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 20))
def test_a_reservoir_holds_rows_that_were_added_and_no_more_than_its_size(lengths, size):
    """All while there is room; each once; the same at every run."""
    rows = torch.arange(float(sum(lengths))).unsqueeze(1)
    held = []
    for _ in range(2):
        reservoir = Reservoir(size)
        for part in rows.split(lengths):
            reservoir.add(part.unsqueeze(0))
        held.append(sorted(reservoir.rows.flatten().tolist()))
    assert held[0] == held[1]
    assert len(held[0]) == len(set(held[0])) == min(size, len(rows))
    assert set(held[0]) <= set(rows.flatten().tolist())


def test_late_rows_are_held_as_often_as_early_ones():
    """Half of what is held comes from either half of what was added."""
    reservoir = Reservoir(400)
    for part in torch.arange(4000.0).unsqueeze(1).split(50):
        reservoir.add(part)
    late = int((reservoir.rows >= 2000).sum())
    assert 160 < late < 240  # four standard deviations


def test_what_is_sampled_is_what_entered_the_layer():
    """All rows of both prompts where there is room, and a part of them where there is none; no hook is left."""
    model, seen = tiny("llama"), []
    down = model.model.layers[1].mlp.down_proj
    hook = down.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0]))
    samples = sample_inputs(model, {"down": down}, CALIBRATION, 1000)["down"]
    hook.remove()
    rows = {tuple(row) for row in torch.cat(seen).tolist()}
    assert {tuple(row) for row in samples.tolist()} == rows
    assert len(rows) == 80
    few = sample_inputs(model, {"down": down}, CALIBRATION, 30)["down"]
    assert few.shape == (30, 128)
    assert {tuple(row) for row in few.tolist()} < rows
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_samples_are_held_for_no_more_layers_at_once_than_there_is_room_for(monkeypatch):
    """Each layer gets its own, in order, however many runs of the model it takes; room is that of a layer."""
    model, runs = tiny("llama"), []
    layers = [layer for layer in linear_layers(model) if layer.name != "lm_head"]
    together = sample_inputs(model, {layer.name: layer.module for layer in layers}, CALIBRATION, 50)
    monkeypatch.setattr("quasar_awq.samples._LEAST", 0)  # leaves 64 · 128 · 4 bytes, 2.56 samples of 64
    hook = model.register_forward_pre_hook(lambda *_: runs.append(1))
    found = list(sample_in_turns(model, layers, CALIBRATION, 50))
    hook.remove()
    assert [layer for layer, _ in found] == layers
    assert all(torch.equal(inputs, together[layer.name]) for layer, inputs in found)
    assert len(runs) == len(CALIBRATION) * 8  # of one block: q k, v o, gate up, down


def test_inputs_of_the_head_are_sampled_at_many_positions():
    """And those of a layer that nothing enters not at all."""
    model = tiny("llama")
    samples = sample_inputs(model, {"head": model.lm_head, "spare": torch.nn.Linear(64, 8)}, CALIBRATION, 1000)
    assert {name: len(rows) for name, rows in samples.items()} == {"head": 64}


def test_inputs_that_are_not_finite_are_refused_by_the_name_of_the_layer():
    """As where a model overflows in half precision."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("inf")
    with pytest.raises(NumericalError, match="what enters q1 is not finite on the calibration prompts"):
        sample_inputs(model, {"q1": model.model.layers[1].self_attn.q_proj}, CALIBRATION, 10)


# Scores

SCORES = {
    "llama": {"q_proj", "k_proj"},
    "qwen3": {"q_proj", "k_proj"},
    "gemma2": {"q_proj", "k_proj"},
    "gemma3": {"q_proj", "k_proj"},
    "mixtral": {"q_proj", "k_proj"},
    "opt": {"q_proj", "k_proj"},
    "gpt_neo": {"q_proj", "k_proj"},
    "phi3": {"qkv_proj"},
    "gpt2": {"c_attn"},
    "bloom": {"query_key_value"},
    "gpt_neox": {"query_key_value"},
    "falcon_alibi": {"query_key_value"},
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SCORES)
def test_queries_and_keys_are_found_by_what_they_do(family, attention):
    """In all blocks, whatever their names, in one projection or several; values, output and MLP are not among them."""
    model = tiny(family, attention="eager" if family in ("gemma2", "bloom", "gpt_neo") else attention)
    layers = list(linear_layers(model))
    found = score_layers(model, layers, CALIBRATION[0])
    assert found == {layer.name for layer in layers if layer.name.rpartition(".")[2] in SCORES[family]}
    assert not any(module._forward_hooks for module in model.modules())
