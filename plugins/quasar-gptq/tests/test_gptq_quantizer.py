"""The quantizer gptq on whole models: the protocol, its blocks, its options, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from quasar import Pipeline
from quasar.errors import InvalidRequestError, NumericalError, UnsupportedModelError
from quasar.testing import check_quantizer
from quasar.testing.models import FAMILIES, random_prompt, tiny
from quasar.weights.layers import Layer, linear_layers
from quasar.weights.linear import QuantizedLinear
from quasar_gptq.observing import blocks_of, observe_in_turn
from quasar_gptq.quantizer import GptqQuantizer
from quasar_gptq.solver import quantize_gptq

CALIBRATION = [torch.tensor([random_prompt(length, seed=length)]) for length in (40, 24, 33)]


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4, "group": 32},
        {"bits": 8, "group": -1, "sym": True},
        {"bits": 4, "group": 16, "act_order": True, "lm_head": True},
        {"bits": 8, "group": 32, "activations": "int8_per_token", "act_order": True},
        {"bits": 8, "group": 32, "activations": "int8_per_group"},
    ],
)
def test_it_keeps_the_protocol(options):
    """Everything that a quantizer promises: tied heads, biases, Conv1D, bfloat16, NaN, no trace on the model."""
    check_quantizer(GptqQuantizer(**options))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_architecture_is_calibrated_and_nearer_than_by_rounding_to_nearest(family):
    """No name of a block is known; in each family logits on the calibration prompts are nearer than without."""
    model = tiny(family)
    quantizer = GptqQuantizer(bits=3, group=32)
    distances = []
    for calibration in (CALIBRATION, None):
        made = quantizer.quantize(model, calibration)
        quantized = made.model
        with torch.no_grad():
            distances += [sum(float((quantized(ids).logits - model(ids).logits).norm()) for ids in CALIBRATION)]
    assert made.report["rounding"] == "to nearest: no layer saw calibration"
    made = quantizer.quantize(model, CALIBRATION)
    description = made.report
    assert (description["rounding"], description["calibrated_layers"]) == ("by GPTQ", len(description["layers"]))
    assert distances[0] < distances[1]


def inputs_of(model: nn.Module, name: str) -> torch.Tensor:
    """All rows that enter a layer for the calibration prompts, in a forward of the whole model."""
    rows: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _m, inputs: rows.append(inputs[0].flatten(0, -2)))
    with torch.no_grad():
        for ids in CALIBRATION:
            model(ids)
    hook.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_layers_see_the_inputs_that_quantized_blocks_before_them_give(family):
    """The record of each layer is that of the Hessian in a model that is quantized as far as the block before."""
    model = tiny(family)
    quantized = GptqQuantizer(bits=3, group=32).quantize(model, CALIBRATION).model
    blocks = blocks_of(model, [layer for layer in linear_layers(model) if layer.name != "lm_head"])
    assert [len(block.layers) for block in blocks] == [len(blocks[0].layers)] * model.config.num_hidden_layers
    done: list[str] = []
    for block in blocks:
        partly = (
            GptqQuantizer(bits=3, group=32, include="|".join(done)).quantize(model, CALIBRATION).model
            if done
            else model
        )
        for layer in block.layers:
            rows = inputs_of(partly, layer.name)
            expected = quantize_gptq(layer.weight, rows.T @ rows, bits=3, group=32)
            record = quantized.get_submodule(layer.name).executor.weight
            assert (record.values != expected.values).float().mean() < 0.02, layer.name
        done += [layer.name for layer in block.layers]


def test_no_more_hessians_than_those_of_one_block_are_asked_for_at_a_time():
    """Blocks come in order, each with the Hessians of its own layers; the head comes last and by itself."""
    model = tiny("llama")
    blocks = blocks_of(model, list(linear_layers(model)))
    seen = [(block.name, set(hessians)) for block, hessians in observe_in_turn(model, blocks, CALIBRATION)]
    assert seen == [(block.name, {layer.name for layer in block.layers}) for block in blocks]
    assert [name for name, _ in seen] == ["model.layers.0", "model.layers.1", "lm_head"]


def test_the_head_s_hessian_is_that_of_all_positions():
    """Not of the last one, which is all that generation would compute."""
    model = tiny("llama")
    (block,) = blocks_of(model, [Layer("lm_head", model.lm_head)])
    ((_, hessians),) = observe_in_turn(model, [block], CALIBRATION)
    rows = inputs_of(model, "lm_head")
    assert torch.allclose(hessians["lm_head"], rows.T @ rows, rtol=1e-4, atol=1e-3)


def test_layers_that_calibration_does_not_reach_are_rounded_to_nearest_and_counted():
    """As an expert that no token was sent to."""
    model = tiny("llama")
    model.model.layers[1].spare = nn.Linear(64, 64)
    model.spare = nn.Linear(64, 64)
    quantizer = GptqQuantizer(bits=4, group=32)
    made = quantizer.quantize(model, CALIBRATION)
    quantized = made.model
    assert made.report["rounding"] == "by GPTQ; to nearest in 2 layers that calibration did not reach"
    for name, module in (("model.layers.1.spare", model.model.layers[1].spare), ("spare", model.spare)):
        expected = quantize_gptq(module.weight, None, bits=4, group=32)
        assert torch.equal(quantized.get_submodule(name).executor.weight.values, expected.values)


def test_a_failing_forward_ends_all_that_was_begun_and_leaves_no_trace():
    """Here the second prompt names a token beyond the vocabulary; the model given still works, and threads are over."""
    import threading

    model, before = tiny("llama"), threading.active_count()
    with pytest.raises(IndexError):
        GptqQuantizer(group=32).quantize(model, [CALIBRATION[0], torch.tensor([[9999]])])
    assert threading.active_count() == before
    assert "forward" not in model.model.layers[0].__dict__
    model(CALIBRATION[0])


def test_threads_are_over_and_blocks_are_themselves_again_after_quantizing():
    """The copy keeps nothing of the way in which it was calibrated."""
    import threading

    before = threading.active_count()
    quantized = GptqQuantizer(group=32).quantize(tiny("llama"), CALIBRATION).model
    assert threading.active_count() == before
    assert all("forward" not in module.__dict__ for module in quantized.modules())
    assert all(not module._forward_pre_hooks for module in quantized.modules())


def test_inputs_that_are_not_finite_are_refused_by_the_layer_s_name():
    """A weight that is finite, and too large for what follows it."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(1e38)
    with pytest.raises(NumericalError, match=r"model.layers.0.mlp.down_proj: its inputs .* are not finite"):
        GptqQuantizer(group=32).quantize(model, CALIBRATION)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 48}, r"group=48 does not divide the 64 inputs of layer model.layers.0.self_attn.q_proj, shape"),
        ({}, r"group=128 does not divide the 64 inputs .*; choose 16, 32, 64, -1, or leave .* exclude=model.layers.0"),
        ({"include": "*.nothing"}, r"no layer matches '\*.nothing'"),
    ],
)
def test_what_does_not_fit_names_layer_shape_and_choices_and_touches_nothing(options, message):
    """Before any weight is quantized and before any forward."""
    model = tiny("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidRequestError, match=message):
        GptqQuantizer(**options).quantize(model, [torch.tensor([[9999]])])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_prompt_that_is_longer_than_the_context_is_refused():
    """By its place, before any forward."""
    model = tiny("llama", max_position_embeddings=32)
    with pytest.raises(InvalidRequestError, match="gptq: calibration prompt 0 has 40 tokens, but the model's context"):
        GptqQuantizer(group=32).quantize(model, CALIBRATION)


def test_a_layer_of_odd_width_can_be_left_out_or_taken_whole():
    """A width of 100 has no group of 64."""
    model = tiny("llama", intermediate_size=100)
    with pytest.raises(InvalidRequestError, match=r"the 100 inputs of layer model.layers.0.mlp.down_proj.*4, 2, -1"):
        GptqQuantizer(group=64).quantize(model, CALIBRATION)
    GptqQuantizer(group=64, exclude="*.down_proj").quantize(model, CALIBRATION)
    GptqQuantizer(group=-1).quantize(model, CALIBRATION)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5, expected one of 2, 3, 4, 8"),
        ({"bits": True}, "bits=True"),
        ({"group": 0}, "group=0, expected a positive integer, or -1"),
        ({"group": True}, "group=True"),
        ({"sym": 1}, "sym=1, expected true or false"),
        ({"act_order": "yes"}, "act_order='yes', expected true or false"),
        ({"damp": 0}, "damp=0, expected a number above 0 and below 1"),
        ({"damp": float("nan")}, "damp=nan"),
        ({"activations": "int4"}, "activations='int4', expected one of none, int8_per_token, int8_per_group"),
        ({"activations": "int8_static"}, "activations='int8_static'"),
        ({"activations": "int8_per_group", "act_order": True}, "a group's inputs would not lie together"),
        ({"lm_head": "yes"}, "lm_head='yes'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    """With what would do."""
    with pytest.raises(InvalidRequestError, match=message):
        GptqQuantizer(**options)


def test_options_reach_the_records():
    """Bits, group, symmetry, rounding of activations and order."""
    model = tiny("llama")
    quantizer = GptqQuantizer(bits=3, group=16, sym=True, act_order=True, activations="int8_per_token", damp=0.2)
    made = quantizer.quantize(model, CALIBRATION)
    quantized = made.model
    for module in quantized.modules():
        if isinstance(module, QuantizedLinear):
            record = module.executor.weight
            assert (record.bits, record.group_size, record.zero_points) == (3, 16, None)
            assert record.activations == "int8_per_token"
            assert sorted(record.input_order.tolist()) == list(range(record.shape[1]))
            assert set(record.values.unique().tolist()) <= set(range(-4, 4))
    description = json.loads(json.dumps(made.report))
    assert (description["damp"], description["sym"], description["act_order"]) == (0.2, True, True)


def test_a_quantized_model_and_one_without_layers_are_refused():
    """As by every quantizer."""
    quantizer = GptqQuantizer(group=32)
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        quantizer.quantize(quantizer.quantize(tiny("llama")).model)
    with pytest.raises(UnsupportedModelError, match="no linear layer that gptq could quantize"):
        GptqQuantizer(group=32, exclude="*").quantize(tiny("llama"))


def test_strictly_verified_output_is_that_of_plain_decoding():
    """Drafts that are right and wrong, with the quantized model as the target."""
    quantizer = GptqQuantizer(bits=3, group=32, act_order=True)
    pipe = Pipeline.from_model(tiny("llama"), quantizer=quantizer, strict=True, drafter="ngram:k=4,max_n=2")
    prompt = [*random_prompt(6), *random_prompt(6)]
    result = pipe.generate_ids(prompt, max_new_tokens=40)
    assert result.token_ids == pipe.reference(prompt, max_new_tokens=40).token_ids
    assert result.guarantee.startswith("quantized: ")


@pytest.mark.real_model
def test_a_real_model_keeps_more_of_what_it_says_on_the_calibration_prompts(smollm2):
    """SmolLM2, two blocks in 3 bits: the divergence from the full model is less than by rounding to nearest."""
    from quasar.pipeline.calibration import own_prompts

    prompts = [smollm2.tokenizer(text, return_tensors="pt").input_ids for text in own_prompts()]
    quantizer = GptqQuantizer(bits=3, group=64, damp=0.1, include="model.layers.4.*|model.layers.5.*")
    divergences = []
    for calibration in (prompts, None):
        quantized = quantizer.quantize(smollm2.model, calibration).model
        with torch.no_grad():
            pairs = [[m(ids).logits[0].log_softmax(-1) for m in (smollm2.model, quantized)] for ids in prompts[:4]]
        divergences += [sum(float((full.exp() * (full - other)).sum(-1).mean()) for full, other in pairs)]
    assert divergences[0] < 0.8 * divergences[1]
