"""The quantizer awq: its copy computes what the model computed but for rounding, and better than rounding alone."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
from torch import nn

from quasar import Pipeline
from quasar.errors import InvalidRequestError, NumericalError
from quasar.pipeline.calibration import own_prompts
from quasar.registry.plugins import load_plugins
from quasar.registry.registry import Registry, default_registry
from quasar.testing import check_quantizer
from quasar.testing.models import FAMILIES, random_prompt, tiny
from quasar.weights.layers import replace_module
from quasar.weights.linear import QuantizedLinear
from quasar_awq.checkpoint import AwqFormat
from quasar_awq.quantizer import AwqQuantizer
from quasar_awq.rounding import Grid
from quasar_awq.samples import sample_inputs

CALIBRATION = [torch.tensor([random_prompt(40, seed=seed)]) for seed in (7, 8)]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([random_prompt(24)])).logits[0]


def records(model: nn.Module) -> dict:
    return {name: m.executor.weight for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def with_outliers(family: str = "llama", **options) -> nn.Module:
    """Some channels of every norm are large, as in trained models."""
    model = tiny(family, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name:
                parameter[::16] *= 12
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"group": 32},
        {"group": -1, "bits": 8, "sym": True, "lm_head": True},
        {"group": 16, "bits": 3},
        {"group": 16, "bits": 4, "clip": False, "activations": "int8_per_group"},
        {"group": 64, "activations": "int8_per_token", "lm_head": True},
    ],
    ids=str,
)
def test_it_keeps_the_protocol(options):
    """Biases, tied heads, Conv1D, bfloat16, the model left as it was, NaN refused by name."""
    check_quantizer(AwqQuantizer(grid=4, samples=32, **options))


@attrs.frozen
class FoldOnly(AwqQuantizer):
    """Scales as AWQ does, but keeps the folded weights in floating point."""

    columns: dict = attrs.field(factory=dict, init=False)

    def _place(self, copy, layer, fold, inputs):
        linear = nn.Linear(*reversed(layer.weight.shape), bias=layer.bias is not None)
        linear.weight = nn.Parameter(fold.apply(layer.weight))
        if layer.bias is not None:
            linear.bias = nn.Parameter(fold.apply_to_bias(layer.bias))
        replace_module(copy.model, layer.name, linear)
        self.columns[layer.name] = fold.columns


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_alone_does_not_change_what_a_model_computes(family):
    """What a search found is divided out where the input is made: with unrounded weights the logits are the same."""
    model = tiny(family)
    scaled = FoldOnly(bits=3, group=16, grid=5).quantize(model, CALIBRATION).model
    torch.testing.assert_close(logits(scaled), logits(model), rtol=0, atol=3e-4)


def test_scales_are_found_for_the_layers_that_share_an_input_and_differ_from_one():
    """q/k/v have the same, so do gate and up; down has its own, with its input made by up; the output has none."""
    model, quantizer = with_outliers(mlp_bias=True, attention_bias=True), FoldOnly(bits=3, group=16, grid=5)
    scaled = quantizer.quantize(model, CALIBRATION).model
    torch.testing.assert_close(logits(scaled), logits(model), rtol=1e-4, atol=1e-3)
    block = {name.rpartition(".")[2]: s for name, s in quantizer.columns.items() if ".layers.0." in name}
    assert block["q_proj"] is block["k_proj"] is block["v_proj"]
    assert block["gate_proj"] is block["up_proj"]
    assert block["o_proj"] is None
    assert all(float(block[name].std()) > 0.05 for name in ("q_proj", "up_proj", "down_proj"))


def test_a_scale_that_a_layer_left_alone_would_need_is_not_used():
    """Without up, nothing divides the input of down; without k, the norm must not be divided for q and v."""
    quantizer = FoldOnly(bits=3, group=16, grid=5, exclude="*.up_proj|*.k_proj")
    model = with_outliers()
    scaled = quantizer.quantize(model, CALIBRATION).model
    torch.testing.assert_close(logits(scaled), logits(model), rtol=0, atol=3e-4)
    assert all(columns is None for columns in quantizer.columns.values())


def error_of(models: list[nn.Module], **options) -> float:
    """Size of the change of the logits, over several models: a single tiny one is a matter of luck."""
    quantizer = AwqQuantizer(**options)
    changes = [logits(quantizer.quantize(model, CALIBRATION).model) - logits(model) for model in models]
    return float(torch.cat(changes).pow(2).mean().sqrt())


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("sym", [False, True])
def test_it_is_nearer_to_the_model_than_rounding_to_nearest(bits, sym):
    """Where activations have outlier channels; on a text that is not the calibration's."""
    models, options = [with_outliers(seed=seed) for seed in range(4)], {"bits": bits, "group": 32, "sym": sym}
    assert error_of(models, **options) < 0.9 * error_of(models, **options, grid=0)


def test_without_calibration_weights_are_rounded_to_nearest_and_it_says_so():
    """The same as with no steps of the search."""
    model, quantizer = tiny("llama"), AwqQuantizer(group=32)
    made = quantizer.quantize(model, None)
    plain = records(made.model)
    assert made.report["method"] == "rounded to nearest (there was no calibration)"
    assert made.report["clipped_layers"] == made.report["scaled_layers"] == 0
    for name, record in plain.items():
        weight = model.get_submodule(name).weight
        torch.testing.assert_close(record.dequantize(), Grid(4, 32, False).nearest(weight.detach()))
    unsearched = AwqQuantizer(group=32, grid=0)
    made = unsearched.quantize(model, CALIBRATION)
    others = records(made.model)
    assert made.report["method"] == "rounded to nearest (grid=0)"
    assert all(torch.equal(others[name].values, record.values) for name, record in plain.items())


def test_what_was_searched_is_told():
    """Of 14 layers, all but the two outputs of attention are scaled, all but queries and keys clipped."""
    quantizer = AwqQuantizer(group=32, grid=4)
    made = quantizer.quantize(tiny("llama"), CALIBRATION)
    description = made.report
    assert description["method"] == "activation-aware"
    assert (description["scaled_layers"], description["clipped_layers"]) == (12, 10)
    assert {"bits": 4, "group": 32, "sym": False, "grid": 4}.items() <= description.items()
    json.dumps(description)


def test_queries_and_keys_are_not_clipped():
    """They are the same with clipping and without it, while values are not."""
    model, options = with_outliers(), {"bits": 3, "group": 32, "grid": 6}
    clipped, plain = (
        records(AwqQuantizer(**options, clip=c).quantize(model, CALIBRATION).model) for c in (True, False)
    )
    same = {name for name, record in clipped.items() if torch.equal(record.scales, plain[name].scales)}
    assert same == {name for name in clipped if name.endswith(("q_proj", "k_proj"))}


def test_clipping_sees_the_inputs_that_the_scaled_layer_gets(monkeypatch):
    """Scaled weights times scaled inputs are the outputs that the layer had; each layer has the inputs of its own."""
    calls = []
    monkeypatch.setattr("quasar_awq.quantizer.clip", lambda *args: calls.append(args) or args[0])
    model = with_outliers()
    AwqQuantizer(bits=3, group=32, grid=5, samples=1000).quantize(model, CALIBRATION)
    names = ["self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    modules = {f"{i}.{name}": model.model.layers[i].get_submodule(name) for i in (0, 1) for name in names}
    samples = sample_inputs(model, modules, CALIBRATION, 1000)
    assert len(calls) == len(modules)
    for (name, module), (weight, inputs, _, _) in zip(modules.items(), calls, strict=True):
        outputs, expected = inputs @ weight.T, samples[name] @ module.weight.T
        if name.endswith("up_proj"):  # its rows were divided for the sake of down
            outputs, expected = (rows / rows.norm(dim=0) for rows in (outputs, expected))
        else:
            assert name.endswith("o_proj") or not torch.allclose(inputs, samples[name])
        torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-3)


def test_a_layer_that_calibration_does_not_reach_is_rounded_to_nearest():
    """As an expert that no token chose."""
    model = tiny("llama")
    model.model.layers[0].spare = nn.Linear(64, 8)
    quantized = AwqQuantizer(group=32, grid=4).quantize(model, CALIBRATION).model
    expected = Grid(4, 32, False).nearest(model.model.layers[0].spare.weight.detach())
    torch.testing.assert_close(records(quantized)["model.layers.0.spare"].dequantize(), expected)


@pytest.mark.parametrize("scheme", ["none", "int8_per_token", "int8_per_group"])
def test_activations_are_rounded_as_asked(scheme):
    """The records say it, and speculation on such a target changes nothing."""
    quantizer = AwqQuantizer(group=32, grid=2, activations=scheme)
    model, prompt = tiny("llama"), [*random_prompt(6), *random_prompt(6)]
    assert {record.activations for record in records(quantizer.quantize(model, CALIBRATION).model).values()} == {scheme}
    pipe = Pipeline.from_model(model, quantizer=quantizer, strict=True, drafter="ngram:k=4,max_n=2")
    result = pipe.generate_ids(prompt, max_new_tokens=40)
    assert result.token_ids == pipe.reference(prompt, max_new_tokens=40).token_ids


def test_the_dtype_of_the_model_is_kept():
    """In the norms that are divided too; half precision holds the scales."""
    for dtype in (torch.bfloat16, torch.float16):
        model = with_outliers(dtype=dtype)
        quantized = AwqQuantizer(bits=8, group=32, grid=4).quantize(model, CALIBRATION).model
        assert {parameter.dtype for parameter in quantized.parameters()} == {dtype}
        change = logits(quantized).float() - logits(model).float()
        assert float(change.pow(2).mean().sqrt()) < 0.05 * float(logits(model).float().pow(2).mean().sqrt())


@pytest.mark.parametrize(
    ("options", "sizes", "message"),
    [
        ({"group": 48}, {}, r"group=48 does not divide the 64 inputs of layer model.layers.0.self_attn.q_proj, shape"),
        ({}, {}, r"group=128 does not divide the 64 inputs of .* choose 16, 32, 64, -1, or leave the layer out with"),
        (
            {"group": 16},
            {"intermediate_size": 100},
            r"group=16 does not divide the 100 inputs of layer model.layers.0.mlp.down_proj, shape \[64, 100\]; "
            r"choose 4, 2, -1",
        ),
    ],
)
def test_a_group_that_does_not_fit_is_refused_before_any_weight_is_touched(options, sizes, message):
    """With the layer, its shape and what would do; the model is as it was."""
    model = tiny("llama", **sizes)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidRequestError, match=message):
        AwqQuantizer(**options).quantize(model, CALIBRATION)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_prompt_that_is_longer_than_the_context_is_refused():
    """By its place; where nothing is searched, no prompt is used and none is refused."""
    model = tiny("llama", max_position_embeddings=32)
    with pytest.raises(InvalidRequestError, match="awq: calibration prompt 0 has 40 tokens, but the model's context"):
        AwqQuantizer(group=32).quantize(model, CALIBRATION)
    AwqQuantizer(group=32, grid=0).quantize(model, CALIBRATION)


def test_odd_sizes_are_quantized_in_whole_rows_and_a_layer_can_be_left_out():
    """What the refusal proposes works."""
    model = tiny("llama", intermediate_size=100)
    assert len(records(AwqQuantizer(group=-1, grid=2).quantize(model, CALIBRATION).model)) == 14
    left_out = AwqQuantizer(group=16, grid=2, exclude="*.down_proj").quantize(model, CALIBRATION).model
    assert len(records(left_out)) == 12


def test_activations_that_are_not_finite_are_refused_and_the_model_is_left_alone():
    """With the layer that they enter."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("inf")
    with pytest.raises(NumericalError, match=r"what enters model\.layers\.1\.self_attn\.\w_proj is not finite"):
        AwqQuantizer(group=32).quantize(model, CALIBRATION)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "awq: bits=5, expected one of 8, 4, 3"),
        ({"bits": True}, "bits=True"),
        ({"group": 0}, "group=0, expected a positive integer, or -1"),
        ({"group": "64"}, "group='64'"),
        ({"sym": 1}, "sym=1, expected true or false"),
        ({"clip": "no"}, "clip='no', expected true or false"),
        ({"grid": -1}, "grid=-1, expected an integer of at least 0"),
        ({"samples": 0}, "samples=0, expected an integer of at least 1"),
        ({"activations": "int8"}, "activations='int8', expected one of none, int8_per_token, int8_per_group"),
        ({"lm_head": "yes"}, "lm_head='yes', expected true or false"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    """With what would do."""
    with pytest.raises(InvalidRequestError, match=message):
        AwqQuantizer(**options)


def test_the_plug_in_is_found_by_its_entry_point(monkeypatch):
    """It provides the quantizer, with its options in a spec string, and the checkpoint format."""
    monkeypatch.setenv("QUASAR_PLUGINS", "quasar-awq")
    default_registry.cache_clear()
    try:
        registry = Registry(load_plugins())
        assert registry.problems() == []
        assert isinstance(registry.build("quantizer", "awq:bits=3,group=32,sym=true"), AwqQuantizer)
        assert isinstance(registry.build("checkpoint", "awq", {"version": "gemm"}), AwqFormat)
    finally:
        default_registry.cache_clear()


TEXTS = (
    "Photosynthesis is the process by which green plants turn light into chemical energy. In the leaves, chlorophyll "
    "absorbs mostly red and blue light, and the energy splits water into hydrogen and oxygen.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n\n\n"
    "print([fibonacci(i) for i in range(10)])\n",
    "Dear Ms Alvarez,\n\nthank you for your letter of 3 March. I am sorry to hear that the parcel arrived damaged. We "
    "will send you a new one this week, free of charge, and collect the old one.\n\nYours sincerely,",
)


@pytest.mark.real_model
@pytest.mark.parametrize("bits", [3, 4])
def test_a_real_model_stays_nearer_to_itself_than_by_rounding_to_nearest(smollm2, bits):
    """SmolLM2, four blocks: the divergence of its next tokens, on texts that the calibration does not have."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    calibration = [torch.tensor([tokenizer(prompt).input_ids[:16]]) for prompt in own_prompts()]

    @torch.no_grad()
    def log_probs(target):
        rows = [target(torch.tensor([tokenizer(text).input_ids])).logits[0] for text in TEXTS]
        return torch.cat(rows).double().log_softmax(-1)

    full, divergence = log_probs(model), {}
    for grid in (0, 6):
        quantizer = AwqQuantizer(bits=bits, group=64, grid=grid, samples=128, include="model.layers.1[0-3].*")
        other = log_probs(quantizer.quantize(model, calibration).model)
        divergence[grid] = float((full.exp() * (full - other)).sum(-1).mean())
    assert divergence[6] < 0.6 * divergence[0]
