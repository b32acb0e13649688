"""The options of w8a8: groups, shift, search, static activations; and how much each layer errs."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quasar import Pipeline
from quasar.commands.cli import cli
from quasar.commands.inspect import inspect_model
from quasar.commands.sensitivity import divergence, measure_sensitivity
from quasar.errors import InvalidRequestError, NumericalError, UnsupportedModelError
from quasar.quantizers.ranges import Range, input_ranges
from quasar.quantizers.smoothing import Fold, smoothing_scales
from quasar.quantizers.tracing import Group, trace_groups
from quasar.quantizers.unrounded import keeping_unrounded, unrounded_twin
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.quantizers.w8a8.scale_search import ALPHAS, output_error, searched_scales
from quasar.quantizers.w8a8.scheme import Int8Scheme
from quasar.quantizers.w8a8.shifting import shift_norm
from quasar.registry.registry import default_registry
from quasar.testing.models import random_prompt, tiny
from quasar.testing.quantizers import check_quantizer
from quasar.testing.running import examples
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.weights.activations import round_inputs
from quasar.weights.layers import Layer, linear_layers
from quasar.weights.linear import QuantizedLinear
from quasar.weights.record import QuantizedWeight, quantize_symmetric
from quasar.weights.shifted_norm import ShiftedNorm

CALIBRATION = [torch.tensor([random_prompt(40, seed=seed)]) for seed in (7, 8)]

model_of = functools.cache(tiny)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([random_prompt(24)])).logits[0]


@pytest.mark.parametrize(
    "spec",
    [
        "w8a8:group=32",
        "w8a8:smooth=shift",
        "w8a8:alpha=search",
        "w8a8:activations=static",
        "w8a8:group=16,smooth=shift,alpha=search,activations=static,lm_head=true",
    ],
)
def test_every_mode_keeps_the_protocol(spec):
    """Tied heads, biases, Conv1D, bfloat16 and more; without calibration, static scales are refused."""
    check_quantizer(spec)


# Groups


@examples(40)
@given(st.integers(1, 12), st.integers(1, 4), st.sampled_from([8, 16]), st.integers(0, 999))
def test_a_scale_for_each_group_errs_no_more_than_one_for_the_row(out, groups, size, seed):
    """No value lies further from its integer than half the smaller scale."""
    weight = randn(out, groups * size, seed=seed) ** 3
    row, grouped = Int8Scheme().record(weight), Int8Scheme(group=size).record(weight)
    assert grouped.scales.shape == (out, groups)
    assert (grouped.scales <= row.scales * (1 + 1e-6)).logical_or(grouped.scales == 1).all()
    bound = grouped.scales.repeat_interleave(size, dim=1) / 2
    assert ((grouped.dequantize() - weight).abs() <= bound * (1 + 1e-4)).all()
    assert (row.activations, grouped.activations) == ("int8_per_token", "int8_per_group")


def test_groups_lower_the_error_of_a_model():
    """A large channel, planted so that the function is unchanged, spoils the scale of its own group only."""
    model = tiny("llama")
    with torch.no_grad():
        for block in model.model.layers:
            attention = block.self_attn
            block.input_layernorm.weight[3] *= 60
            for consumer in (attention.q_proj, attention.k_proj, attention.v_proj):
                consumer.weight[:, 3] /= 60
    errors = [
        (logits(W8A8Quantizer(group=group, smooth="none").quantize(model).model) - logits(model)).std()
        for group in (-1, 8)
    ]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    ("options", "group", "message"),
    [
        ({}, 48, r"w8a8: group=48 does not divide the 64 inputs of layer model.layers.0.self_attn.q_proj, shape \[64"),
        ({"intermediate_size": 100}, 64, r"the 100 inputs of layer model.layers.0.mlp.down_proj, .* choose 4, 2, -1"),
        ({}, 128, r"shape \[64, 64\]; choose 16, 32, 64, -1, or leave the layer out with exclude=model.layers.0"),
    ],
)
def test_a_group_that_does_not_fit_names_layer_shape_and_choices_and_touches_nothing(options, group, message):
    """Before any weight is quantized."""
    model = tiny("llama", **options)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidRequestError, match=message):
        W8A8Quantizer(group=group).quantize(model, CALIBRATION)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_a_layer_that_no_group_fits_can_be_left_out():
    """The rest is quantized in groups."""
    quantized = W8A8Quantizer(group=64, exclude="*.down_proj").quantize(tiny("llama", intermediate_size=100)).model
    assert isinstance(quantized.model.layers[0].mlp.up_proj, QuantizedLinear)
    assert type(quantized.model.layers[0].mlp.down_proj) is nn.Linear


# Shift


class Holder(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@given(seed=st.integers(0, 999))
@examples(20)
@torch.no_grad()
def test_a_shift_is_undone_exactly_by_the_bias_of_the_consumer(norm, dtype, seed):
    """In bfloat16 too: what is folded is the shift as the norm's bias holds it."""
    holder = Holder(norm(8).to(dtype))
    rows, weight = randn(5, 8, seed=seed).to(dtype), randn(6, 8, seed=seed + 1)
    before = holder.norm(rows).float()
    shift, ones = randn(8, seed=seed + 2) * 3, torch.ones(8)
    kept = shift_norm(holder, "norm", shift, ones)
    assert isinstance(holder.norm, ShiftedNorm) == (norm is nn.RMSNorm)
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(kept, shift, rtol=rounding)
    after = holder.norm(rows)
    assert after.dtype == dtype
    bias = Fold(shift=kept).apply_to_bias(None, weight)
    # A bfloat16 output is rounded once more, by at most 2**-8 of its size.
    spread = 1e-4 if dtype == torch.float32 else float((after.abs().float() @ weight.abs().T).max()) * 2**-7
    assert torch.allclose(after.float() @ weight.T + bias, before @ weight.T, atol=spread)


def test_a_shift_comes_before_the_factor_of_the_rows():
    """Worked by hand: W = [[1, 2]], b = 3, z = [10, 100], rows 0.5: 0.5 · (3 + 10 + 200)."""
    fold = Fold(rows=torch.tensor([0.5]), shift=torch.tensor([10.0, 100.0]))
    weight = torch.tensor([[1.0, 2.0]])
    assert fold.apply_to_bias(torch.tensor([3.0]), weight).tolist() == [106.5]
    assert fold.apply_to_bias(None, weight).tolist() == [105.0]


def test_a_shift_moves_the_middle_of_each_range_to_zero():
    """Of the inputs of q/k/v and of gate/up on the calibration prompts; the full model's norms stay as they are."""
    model = model_of("llama")
    with keeping_unrounded() as kept:
        quantized = W8A8Quantizer(smooth="shift").quantize(model, CALIBRATION).model
    twin = unrounded_twin(quantized, kept)
    names = [f"model.layers.1.{name}" for name in ("self_attn.q_proj", "mlp.up_proj")]
    layers = [Layer(name, twin.get_submodule(name)) for name in names]
    for found in input_ranges(twin, layers, CALIBRATION).values():
        assert torch.allclose(found.high, -found.low, rtol=1e-3, atol=1e-3)
    assert isinstance(quantized.model.layers[0].input_layernorm, ShiftedNorm)
    assert "model.layers.0.input_layernorm.bias" in quantized.state_dict()
    assert not any(isinstance(module, ShiftedNorm) for module in model.modules())


def test_a_shift_lowers_the_error_where_channels_lie_far_from_zero():
    """Channels moved by a bias of the norm, which LayerNorm has: their range about zero is ten times too wide."""
    model = tiny("gpt_neox")
    with torch.no_grad():
        for block in model.gpt_neox.layers:
            block.input_layernorm.bias += 30
    error = {
        smooth: (
            logits(W8A8Quantizer(smooth=smooth, include="*.query_key_value").quantize(model, CALIBRATION).model)
            - logits(model)
        ).std()
        for smooth in ("scale", "shift")
    }
    assert error["shift"] < 0.5 * error["scale"]


# Search


def group_of(seed: int, *, outs: tuple[int, ...] = (12, 6), size: int = 16) -> Group:
    """Consumers whose inputs have channels of very different sizes."""
    inputs = randn(40, size, seed=seed) * randn(size, seed=seed + 1).exp() ** 2
    consumers = {}
    for i, out in enumerate(outs):
        linear = nn.Linear(size, out, bias=False)
        linear.weight = nn.Parameter(randn(out, size, seed=seed + 2 + i) ** 3)
        consumers[f"layer{i}"] = Layer(f"layer{i}", linear)
    return Group("norm", nn.LayerNorm(size), consumers, range=Range.of(inputs), samples=[inputs[:25], inputs[25:]])


@examples(30)
@given(st.integers(0, 9999), st.sampled_from([-1, 8]), st.booleans(), st.booleans())
@torch.no_grad()
def test_the_searched_strength_errs_no_more_than_any_fixed_one(seed, group_size, static, shifted):
    """By its own measure, whatever the rounding."""
    group, scheme = group_of(seed), Int8Scheme(group_size, static)
    shift = group.range.middle if shifted else None
    found = output_error(group, searched_scales(group, scheme, shift), scheme, shift)
    peaks = group.range.moved(shift, None).peaks
    for alpha in ALPHAS:
        assert found <= output_error(group, smoothing_scales(group, alpha, peaks), scheme, shift)


@torch.no_grad()
def test_the_error_that_is_searched_is_that_of_the_outputs():
    """Against products written out: each consumer's squared error as a share of its squares."""
    group, scheme, scales = group_of(3), Int8Scheme(), torch.linspace(0.5, 2, 16)
    rows, expected = torch.cat(group.samples) / scales, 0.0
    for layer in group.consumers.values():
        record = scheme.record(layer.weight * scales)
        exact = torch.cat(group.samples) @ layer.weight.T
        change = round_inputs(rows, record) @ record.dequantize().T - exact
        expected += float(change.norm() ** 2 / exact.norm() ** 2)
    assert output_error(group, scales, scheme) == pytest.approx(expected, rel=1e-3)


def test_a_few_inputs_of_every_prompt_are_sampled():
    """At even distances, no more than asked for; none where no search needs them."""
    model = model_of("llama")
    layers = list(linear_layers(model))
    for group in trace_groups(model, layers, CALIBRATION, rows=7):
        assert [len(rows) for rows in group.samples] == [7, 7]
        assert (group.sampled_inputs().abs() <= group.peaks).all()
    assert all(group.samples == [] for group in trace_groups(model, layers, CALIBRATION))


# Static activations


def test_static_activations_need_calibration():
    """And say what would do without."""
    with pytest.raises(InvalidRequestError, match=r"activations=static needs calibration prompts.*activations=dynamic"):
        W8A8Quantizer(activations="static").quantize(model_of("llama"))


@pytest.mark.parametrize("smooth", ["none", "scale", "shift"])
def test_the_static_scale_is_that_of_the_largest_input_after_smoothing(smooth):
    """Of the calibration prompts: the twin's own inputs, divided by 127."""
    with keeping_unrounded() as kept:
        quantized = W8A8Quantizer(activations="static", smooth=smooth).quantize(model_of("llama"), CALIBRATION).model
    twin = unrounded_twin(quantized, kept)
    for name, found in input_ranges(twin, [Layer(n, twin.get_submodule(n)) for n in kept], CALIBRATION).items():
        scale = quantized.get_submodule(name).executor.weight.input_scale
        assert float(scale) == pytest.approx(float(found.peaks.amax()) / 127, rel=1e-3), name


def test_a_layer_whose_inputs_are_all_zero_has_a_scale_all_the_same():
    """One, as a row of zeros has."""
    assert Int8Scheme(static=True).record(randn(2, 4, seed=0), torch.tensor(0.0)).input_scale == 1


def test_inputs_that_are_not_finite_are_refused_by_the_name_of_the_layer():
    """A static scale of infinity would make every input zero."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight[3] = torch.inf
    with pytest.raises(NumericalError, match=r"input of model.layers.0.mlp.gate_proj is not finite"):
        W8A8Quantizer(activations="static", smooth="none").quantize(model, CALIBRATION)


# Sensitivity


def test_a_model_without_a_tokenizer_has_no_prompts_to_measure_on(tmp_path):
    """A user's mistake, and said so."""
    tiny("llama").save_pretrained(tmp_path)
    result = CliRunner().invoke(cli, ["inspect", "--model", str(tmp_path), "--sensitivity"])
    assert isinstance(result.exception, UnsupportedModelError)


def sensitivity_of(quantizer, model, **options):
    return measure_sensitivity(model, quantizer, CALIBRATION, **options)[1]


def test_a_layer_alone_has_the_divergence_of_a_model_with_that_layer_alone_quantized():
    """Without smoothing, ``include`` makes the very same model."""
    model, prompts = model_of("llama"), [CALIBRATION[0], CALIBRATION[1][:, :24]]
    report = sensitivity_of(W8A8Quantizer(smooth="none"), model)
    assert (report.tokens, len(report.layers)) == (64, 14)
    assert [layer.kl for layer in report.layers] == sorted((layer.kl for layer in report.layers), reverse=True)
    with torch.no_grad():
        exact = torch.cat([model(ids).logits[0] for ids in prompts]).double().log_softmax(-1)
        for layer in (report.layers[0], report.layers[-1]):
            alone = W8A8Quantizer(smooth="none", include=layer.name).quantize(model).model
            other = torch.cat([alone(ids).logits[0] for ids in prompts]).double().log_softmax(-1)
            expected = float((exact.exp() * (exact - other)).sum(-1).mean())
            assert layer.kl == pytest.approx(expected, rel=0.02)
            assert layer.nbytes == alone.get_submodule(layer.name).executor.weight.nbytes


def test_a_smoothed_layer_is_charged_with_its_rounding_alone():
    """Not with what smoothing moved: errors are small, and together they are about that of the whole."""
    report = sensitivity_of(W8A8Quantizer(smooth="shift"), model_of("llama"))
    assert all(0 < layer.output_error < 0.05 for layer in report.layers)
    assert 0.3 < sum(layer.kl for layer in report.layers) / report.kl < 3


def test_the_layer_that_is_rounded_coarsely_comes_first():
    """One layer in two bits among others in eight: it is the first, and its error the largest."""

    class Coarse(Int8Scheme):
        def record(self, weight, peak=None):
            if weight.shape == (128, 64) and weight.equal(target):
                values, scales = quantize_symmetric(weight, bits=2)
                return QuantizedWeight(values, scales, bits=2)
            return super().record(weight, peak)

    class Uneven(W8A8Quantizer):
        scheme = Coarse()

    model = model_of("llama")
    target = model.model.layers[1].mlp.up_proj.weight
    report = sensitivity_of(Uneven(smooth="none"), model)
    assert (report.layers[0].name, report.layers[0].bits) == ("model.layers.1.mlp.up_proj", 2)
    assert report.layers[0].output_error == max(layer.output_error for layer in report.layers)


def test_the_models_are_left_as_they_were():
    """The layers that were tried out are put back; nothing is kept beyond the measurement."""
    model = tiny("qwen2")
    expected = logits(model)
    made, _ = measure_sensitivity(model, W8A8Quantizer(), CALIBRATION)
    quantized = made.model
    assert torch.equal(logits(model), expected)
    assert torch.equal(logits(quantized), logits(W8A8Quantizer().quantize(model, CALIBRATION).model))
    assert not any(module._forward_hooks for module in quantized.modules())


def test_without_prompts_or_a_word_about_what_was_rounded_there_is_no_measurement():
    """The reason is said."""
    with pytest.raises(UnsupportedModelError, match="without a tokenizer has none"):
        measure_sensitivity(model_of("llama"), W8A8Quantizer(), None)

    class Silent(W8A8Quantizer):
        def quantize(self, model, calibration=None):
            with keeping_unrounded():
                return super().quantize(model, calibration)

    with pytest.raises(UnsupportedModelError, match="Silent does not say what it rounded"):
        measure_sensitivity(model_of("llama"), Silent(), CALIBRATION)


@examples(30)
@given(st.integers(0, 999), st.floats(1e-4, 3))
def test_the_divergence_is_that_of_the_definition(seed, size):
    """In float64 by Σ p·(log p − log q); a tiny one does not drown in rounding."""
    exact = randn(3, 50, seed=seed)
    other = exact + size * randn(3, 50, seed=seed + 1)
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    expected = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence(exact.log_softmax(-1), other.log_softmax(-1)) == pytest.approx(expected, rel=0.02, abs=1e-12)


def test_the_table_and_the_json_name_every_layer(monkeypatch, tmp_path):
    """Sorted, with the figure of all layers together."""
    tiny("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("quasar.pipeline.plan.Plan.calibration_for", lambda *_: CALIBRATION)
    arguments = ["inspect", "--model", str(tmp_path), "--quantizer", "hqq:bits=2,group=16", "--sensitivity"]
    out = CliRunner().invoke(cli, arguments).stdout
    assert "over 64 tokens; all together: " in out
    found = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["sensitivity"]
    assert found["tokens"] == 64
    assert len(found["layers"]) == 14
    lines = [line.split() for line in out.splitlines()]
    begin = lines.index(["NAME", "BITS", "NBYTES", "KL", "OUTPUT", "ERROR"])
    assert [line[0] for line in lines[begin + 1 : begin + 15]] == [layer["name"] for layer in found["layers"]]
    assert "sensitivity" not in inspect_model(str(tmp_path))
    with pytest.raises(InvalidRequestError, match="no quantizer is asked for"):
        inspect_model(str(tmp_path), quantizer="none", sensitivity=True)


@pytest.mark.parametrize("spec", ["w8a8:smooth=shift", "w8a8:group=16", "w8a8:activations=static"])
def test_strictly_verified_output_is_that_of_plain_decoding_in_every_mode(spec):
    """Shifted norms and scales of groups depend on no other row either."""
    model = tiny("llama")
    pipe = Pipeline(
        CausalLMVerifier(default_registry().build("quantizer", spec).quantize(model, CALIBRATION).model).strict()
    )
    prompt = [*random_prompt(6), *random_prompt(6)]
    result = pipe.generate_ids(prompt, max_new_tokens=40)
    assert result.token_ids == pipe.reference(prompt, max_new_tokens=40).token_ids


@pytest.mark.real_model
def test_groups_bring_a_real_model_nearer_to_the_full_one(smollm2):
    """SmolLM2 without smoothing: groups of 32 against one scale a token, on a short text."""
    text = "The old lighthouse stood at the end of the pier, where the river met the sea. Every evening the keeper"
    inputs = smollm2.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        exact = smollm2.model(inputs).logits[0].log_softmax(-1)
        kl = [
            divergence(exact, W8A8Quantizer(group=g).quantize(smollm2.model).model(inputs).logits[0].log_softmax(-1))
            for g in (-1, 32)
        ]
    assert kl[1] < 0.5 * kl[0]
    assert kl[1] < 0.02
