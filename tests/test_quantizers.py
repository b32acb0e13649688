"""Quantizers: what is changed, what is left alone, and what smoothing may not change."""

from __future__ import annotations

import functools
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quasar import Pipeline
from quasar.errors import InvalidRequestError, NumericalError, PluginError, UnknownStrategyError, UnsupportedModelError
from quasar.pipeline.calibration import own_prompts, prompts_from
from quasar.quantizers.none import NoQuantizer
from quasar.quantizers.tracing import trace_groups
from quasar.quantizers.unrounded import keeping_unrounded, unrounded_twin
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.registry.registry import default_registry
from quasar.testing import check_quantizer
from quasar.testing.fakes import scripted
from quasar.testing.models import FAMILIES, VOCAB_SIZE, greedy, random_prompt, tiny
from quasar.types import Quantized
from quasar.weights.layers import linear_layers, replace_module
from quasar.weights.linear import QuantizedLinear

CALIBRATION = [torch.tensor([random_prompt(40, seed=seed)]) for seed in (7, 8)]

model_of = functools.cache(tiny)
"""Models are made once and never changed; a test that changes one makes its own."""


@torch.no_grad()
def logits(model: nn.Module, length: int = 24) -> torch.Tensor:
    return model(torch.tensor([random_prompt(length)])).logits[0]


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lm_head", [False, True])
def test_the_full_model_is_left_bit_identical_and_usable(family, lm_head):
    """Quantizing is not done in place, with smoothing (which divides norms) neither."""
    model = tiny(family)
    before, expected, config = snapshot(model), logits(model), model.config.to_dict()
    quantized = W8A8Quantizer(lm_head=lm_head).quantize(model, CALIBRATION).model
    assert not torch.equal(logits(quantized), expected)
    assert torch.equal(logits(model), expected)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.config.to_dict() == config
    assert not quantized_layers(model)
    assert not any(module._forward_hooks for module in [*model.modules(), *quantized.modules()])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_quantized_model_says_nearly_what_the_full_model_says(family):
    """Eight bits are enough for logits that agree to a few hundredths of their spread."""
    model = model_of(family)
    error = logits(W8A8Quantizer().quantize(model, CALIBRATION).model) - logits(model)
    assert error.std() < 0.1 * logits(model).std()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_but_the_head_is_quantized(family):
    """Coverage is complete and reported; what is not a linear layer is listed with the reason."""
    model, quantizer = model_of(family), W8A8Quantizer()
    made = quantizer.quantize(model)
    quantized = made.model
    names = [layer.name for layer in linear_layers(model) if layer.module is not model.get_output_embeddings()]
    report = made.report
    assert list(quantized_layers(quantized)) == names == [layer["name"] for layer in report["layers"]]
    skipped = {entry["name"]: entry["reason"] for entry in report["skipped"]}
    matrices = {name for name, parameter in quantized.named_parameters() if parameter.dim() >= 2}
    assert set(skipped) == matrices
    assert skipped["lm_head.weight"] == "linear layer left alone"
    assert all(skipped.values())
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(dict(report)))


def test_fused_experts_are_listed_as_skipped_with_the_reason():
    """They are 3-D parameters, not linear layers; nobody may take the model for a fully quantized one."""
    quantizer = W8A8Quantizer()
    made = quantizer.quantize(model_of("mixtral"))
    skipped = {entry["name"]: entry["reason"] for entry in made.report["skipped"]}
    assert skipped["model.layers.0.mlp.experts.gate_up_proj"] == "a 3-D parameter of MixtralExperts, not a linear layer"
    assert skipped["model.embed_tokens.weight"] == "embedding"


class Router(nn.Linear):
    """A linear layer that returns more than its product, as Llama 4's router does."""

    def forward(self, hidden):
        scores = super().forward(hidden)
        return scores.softmax(-1), scores


def test_a_linear_layer_with_a_forward_of_its_own_is_left_alone():
    """What replaced it would compute something else."""
    toy = Toy(
        lambda toy, hidden: toy.linear(hidden) * toy.router(hidden)[0], linear=nn.Linear(16, 16), router=Router(16, 16)
    )
    quantizer = W8A8Quantizer()
    made = quantizer.quantize(toy, CALIBRATION)
    quantized = made.model
    assert list(quantized_layers(quantized)) == ["linear"]
    assert {"name": "router.weight", "reason": "a 2-D parameter of Router, not a linear layer"} in made.report[
        "skipped"
    ]
    assert quantized(CALIBRATION[0]).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_changed_is_shared(family):
    """No second copy of an embedding, a head or a norm in memory."""
    model = model_of(family)
    quantized = W8A8Quantizer(smooth=False).quantize(model).model
    own = dict(quantized.named_parameters())
    biases = {f"{name}.bias" for name in quantized_layers(quantized)}
    assert own.keys() - biases
    for name, parameter in model.named_parameters():
        if name in own:
            assert own[name].data_ptr() == parameter.data_ptr(), name


def test_tied_embeddings_keep_their_values_and_stay_tied_by_default():
    """By default the head is left alone, so nothing is untied."""
    model = tiny("llama", tie_word_embeddings=True)
    quantized = W8A8Quantizer().quantize(model, CALIBRATION).model
    assert quantized.lm_head.weight is quantized.get_input_embeddings().weight
    assert quantized.lm_head.weight is model.lm_head.weight


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_quantized_head_is_a_separate_copy_that_tying_does_not_undo(family):
    """The embedding keeps its bits, the full model stays tied, and a later ``tie_weights`` changes nothing."""
    model = tiny(family, tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight.clone()
    quantizer = W8A8Quantizer(lm_head=True)
    made = quantizer.quantize(model, CALIBRATION)
    quantized = made.model
    assert "lm_head" in quantized_layers(quantized)
    expected = logits(quantized)
    quantized.tie_weights()
    assert "lm_head" in quantized_layers(quantized)
    assert not quantized.config.tie_word_embeddings
    assert [name for name, _ in quantized.lm_head.named_parameters()] == []
    assert torch.equal(logits(quantized), expected)
    assert torch.equal(quantized.get_input_embeddings().weight, embedding)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings
    assert "lm_head" in [layer["name"] for layer in made.report["layers"]]


@pytest.mark.parametrize("family", ["qwen2", "opt", "gpt2", "gpt_neox", "bloom"])
def test_biases_are_kept(family):
    """Without smoothing, to the bit."""
    model = model_of(family)
    quantized = quantized_layers(W8A8Quantizer(smooth=False).quantize(model).model)
    with_bias = [layer for layer in linear_layers(model) if layer.name in quantized and layer.bias is not None]
    assert with_bias
    for layer in with_bias:
        assert layer.bias.abs().max() > 0, "a zero bias cannot be lost"
        assert torch.equal(quantized[layer.name].bias, layer.bias)


def test_gpt2_is_quantized_as_the_same_weights_in_linear_layers_would_be():
    """Its ``Conv1D`` stores the transposed weight."""
    model, same = tiny("gpt2"), tiny("gpt2")
    convolutions = [(name, module) for name, module in same.named_modules() if isinstance(module, Conv1D)]
    assert len(convolutions) == 8
    for name, module in convolutions:
        linear = nn.Linear(*module.weight.shape)
        linear.weight, linear.bias = nn.Parameter(module.weight.T.contiguous()), module.bias
        replace_module(same, name, linear)
    ours, theirs = (W8A8Quantizer(smooth=False).quantize(m).model for m in (model, same))
    assert len(quantized_layers(ours)) == 8
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_tensor_that_is_not_finite_is_refused_by_name_before_anything_is_changed(bad, kind):
    """A scale of NaN would make a whole channel NaN without a word."""
    model = tiny("qwen2")
    getattr(model.model.layers[1].self_attn.k_proj, kind).data.view(-1)[5] = bad
    before = snapshot(model)
    with pytest.raises(NumericalError, match=rf"model\.layers\.1\.self_attn\.k_proj\.{kind} has 1 non-finite value"):
        W8A8Quantizer().quantize(model, CALIBRATION)
    assert all(
        torch.equal(
            tensor,
            before[name],
        )
        or name.endswith(f"k_proj.{kind}")
        for name, tensor in model.state_dict().items()
    )
    assert not quantized_layers(model)


def test_a_model_that_is_quantized_already_is_refused():
    """Quantizing twice would lose precision without need."""
    quantized = W8A8Quantizer().quantize(model_of("llama")).model
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM is quantized already; give the full model"):
        W8A8Quantizer().quantize(quantized)


class Toy(nn.Module):
    """Embedding, whatever ``layers`` are, and a head; ``compute(toy, hidden)`` is the middle of its forward."""

    def __init__(self, compute=lambda toy, hidden: hidden, **layers: nn.Module) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB_SIZE, 16), nn.Linear(16, VOCAB_SIZE, bias=False)
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.eval()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, use_cache=False, logits_to_keep=0):
        return self.head(self.compute(self, self.embed(input_ids)))


def test_a_model_without_linear_layers_is_refused():
    """Returning it unchanged would look like success."""
    with pytest.raises(UnsupportedModelError, match="Toy has no linear layer that w8a8 could quantize"):
        W8A8Quantizer().quantize(Toy())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smooth": 1}, "smooth=1, expected one of scale, shift, none"),
        ({"lm_head": "yes"}, "lm_head='yes', expected true or false"),
        ({"alpha": -0.1}, "alpha=-0.1, expected a number from 0 to 1"),
        ({"alpha": 1.5}, "alpha=1.5, expected a number from 0 to 1"),
        ({"alpha": True}, "alpha=True, expected a number"),
        ({"alpha": "half"}, "alpha='half', expected a number"),
        ({"alpha": float("nan")}, "alpha=nan, expected a number"),
        ({"smooth": "yes"}, "smooth='yes', expected one of scale, shift, none"),
        ({"group": 0}, "group=0, expected a positive integer, or -1"),
        ({"group": True}, "group=True, expected a positive integer"),
        ({"activations": "none"}, "activations='none', expected one of dynamic, static"),
        ({"kernel": "cuda"}, "no kernel named 'cuda'. Installed: dense"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_bad_option_is_refused_by_name(options, message):
    """With what was given and what would do."""
    with pytest.raises(InvalidRequestError) as caught:
        W8A8Quantizer(**options)
    assert message in str(caught.value)


def test_an_option_that_there_is_not_is_refused():
    """In a spec string, before any model is touched."""
    with pytest.raises(InvalidRequestError, match="has no option 'alhpa'"):
        Pipeline.from_model(object(), quantizer="w8a8:alhpa=0.5")
    with pytest.raises(UnknownStrategyError, match="no quantizer named 'w8a9'"):
        Pipeline.from_model(object(), quantizer="w8a9")


@pytest.mark.parametrize("kernel", ["reference", "torch"])
def test_the_kernel_that_is_asked_for_executes_every_layer(kernel):
    """And the report says which it was; the result does not depend on it."""
    model, quantizer = model_of("qwen2"), W8A8Quantizer(kernel=kernel)
    made = quantizer.quantize(model, CALIBRATION)
    quantized = made.model
    assert made.report["kernels"] == [kernel]
    assert torch.equal(logits(quantized), logits(W8A8Quantizer().quantize(model, CALIBRATION).model))


def test_quantizing_is_deterministic():
    """Twice the same model and calibration: twice the same bits; one quantizer may be used again."""
    quantizer = W8A8Quantizer()
    first, second = (quantizer.quantize(model_of("llama"), CALIBRATION) for _ in range(2))
    assert torch.equal(logits(first.model), logits(second.model))
    assert first.report == second.report
    assert len(first.report["layers"]) == 14


SPECS = ["w8a8", "w8a8:smooth=shift,group=16", "hqq:group=16", "none"]


@pytest.mark.parametrize("spec", SPECS)
def test_two_pipelines_that_share_a_quantizer_report_their_own(spec):
    """Also at the same time: a quantizer remembers nothing of a model, and describes its options only."""
    quantizer = default_registry().build("quantizer", spec)
    described = quantizer.describe()
    models = [tiny("llama"), tiny("llama", num_hidden_layers=1), tiny("gpt2")]
    alone = [default_registry().build("quantizer", spec).quantize(model, CALIBRATION).report for model in models]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda model: quantizer.quantize(model, CALIBRATION), models))
    assert [made.report for made in together] == alone
    assert quantizer.describe() == described
    assert described.items() <= alone[0].items()
    if spec != "none":
        assert [len(report["layers"]) for report in alone] == [14, 7, 8]
    first, second = (Pipeline.from_model(model, quantizer=quantizer) for model in models[:2])
    skipped = [len(pipe.description["quantization"].get("skipped", ())) for pipe in (first, second)]
    assert skipped == [len(quantizer.quantize(model, None).report.get("skipped", ())) for model in models[:2]]


def test_a_quantizer_that_returns_a_bare_model_is_told_what_to_return():
    class Bare:
        def quantize(self, model, calibration=None):
            return model

        def describe(self):
            return {}

    expected = r"Bare.quantize returned LlamaForCausalLM, expected quasar\.Quantized\(model, report\)"
    for build in (lambda: Pipeline.from_model(model_of("llama"), quantizer=Bare()), lambda: check_quantizer(Bare())):
        with pytest.raises(PluginError, match=expected):
            build()


def test_the_do_nothing_quantizer_returns_the_model_it_is_given():
    """No copy, no change."""
    assert NoQuantizer().quantize(model_of("llama")).model is model_of("llama")
    assert NoQuantizer().describe() == {"quantizer": "none"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_tokens_equal_those_of_the_quantized_model_decoded_alone(family, bad):
    """By the pipeline's reference and by transformers' own generate on the quantized model."""
    model, prompt = model_of(family), random_prompt(12)
    reference = Pipeline.from_model(model, drafter="none").reference(prompt, max_new_tokens=30, eos_token_id=None)
    assert list(reference.token_ids) == greedy(W8A8Quantizer().quantize(model).model, prompt, 30)
    pipe = Pipeline.from_model(model, drafter=scripted(12, reference.token_ids, 7, bad, VOCAB_SIZE))
    assert pipe.generate_ids(prompt, max_new_tokens=30, eos_token_id=None).token_ids == reference.token_ids


# Smoothing


def unrounded(quantizer: W8A8Quantizer, model: nn.Module) -> nn.Module:
    """The quantized copy with all that smoothing moved, and without any rounding."""
    with keeping_unrounded() as kept:
        quantized = quantizer.quantize(model, CALIBRATION).model
    assert set(kept) == set(quantized_layers(quantized))
    twin = unrounded_twin(quantized, kept)
    assert not quantized_layers(twin)
    return twin


def smoothed_by(made: Quantized) -> tuple[str, ...]:
    """Names of the layers whose input is smoothed."""
    return tuple(layer["name"] for layer in made.report["layers"] if layer["smoothed"])


def smoothed_layers(family: str) -> set[str]:
    """The same within one block."""
    made = W8A8Quantizer().quantize(model_of(family), CALIBRATION)
    return {".".join(name.split(".")[-2:]) for name in smoothed_by(made)}


ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
SMOOTHED = {
    "llama": ATTENTION | MLP,
    "qwen2": ATTENTION | MLP,
    "qwen3": ATTENTION | MLP,
    "mistral_window": ATTENTION | MLP,
    "gemma2": ATTENTION | MLP,
    "gemma3": ATTENTION | MLP,
    "mixtral": ATTENTION,
    "gpt_neox": {"attention.query_key_value", "mlp.dense_h_to_4h"},
    "phi3": {"self_attn.qkv_proj", "mlp.gate_up_proj"},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("smooth", ["scale", "shift"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_alone_does_not_change_what_a_model_computes(family, smooth, alpha):
    """Divided norms and multiplied columns cancel: with unrounded weights the logits are the same to rounding."""
    model = model_of(family)
    smoothed = unrounded(W8A8Quantizer(alpha=alpha, smooth=smooth), model)
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=0, atol=2e-4)


def test_the_bias_of_a_scaled_up_projection_is_scaled_too():
    """Its rows are divided, so its bias must be."""
    model = tiny("llama", mlp_bias=True, attention_bias=True)
    assert model.model.layers[0].mlp.up_proj.bias.abs().max() > 0
    smoothed = unrounded(W8A8Quantizer(), model)
    torch.testing.assert_close(logits(smoothed), logits(model), rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", SMOOTHED)
def test_smoothing_reaches_the_layers_that_it_can(family):
    """The input of q/k/v and of gate/up (folded into the norm) and of down (folded into up), by whatever name."""
    assert smoothed_layers(family) == SMOOTHED[family]


def test_the_groups_of_a_llama_are_exactly_these():
    """Norm to q/k/v, norm to gate/up, up to down: nothing else feeds linear layers alone."""
    model = model_of("llama")
    groups = trace_groups(model, list(linear_layers(model)), CALIBRATION)
    found = {group.name: set(group.consumers) for group in groups}
    expected = {}
    for block in ("model.layers.0", "model.layers.1"):
        expected[f"{block}.input_layernorm"] = {f"{block}.{name}" for name in ATTENTION}
        expected[f"{block}.post_attention_layernorm"] = {f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"}
        expected[f"{block}.mlp.up_proj"] = {f"{block}.mlp.down_proj"}
    assert found == expected


def test_the_peaks_are_the_largest_inputs_over_all_prompts():
    """By channel, as hooks on the consumers see them."""
    model, seen = tiny("llama"), []
    down = model.model.layers[0].mlp.down_proj
    groups = trace_groups(model, list(linear_layers(model)), CALIBRATION)
    down.register_forward_pre_hook(lambda _module, args: seen.append(args[0].abs().flatten(0, -2)))
    with torch.no_grad():
        for token_ids in CALIBRATION:
            model(token_ids, use_cache=False)
    peaks = next(group.peaks for group in groups if group.name == "model.layers.0.mlp.up_proj")
    assert torch.equal(peaks, torch.cat(seen).amax(0))


UNSAFE = {
    "added to the residual": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) + n,
    "concatenated in a list": lambda toy, hidden: (
        toy.linear(n := toy.norm(hidden)) + torch.cat([n, hidden], dim=-1)[..., :16]
    ),
    "stacked as a keyword": lambda toy, hidden: (
        toy.linear(n := toy.norm(hidden)) + torch.stack(tensors=(n, hidden)).sum(0)
    ),
    "sliced": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) + n[..., :1],
    "transposed by an attribute": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) + n.mT.mT,
    "a plain product": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) + n @ toy.matrix,
    "the linear layer has another input": lambda toy, hidden: toy.linear(toy.norm(hidden)) + toy.linear(hidden),
    "the linear layer has another norm": lambda toy, hidden: (
        toy.linear(toy.norm(hidden)) + toy.linear(toy.other_norm(hidden))
    ),
    "the weight is used by two layers": lambda toy, hidden: toy.linear(toy.norm(hidden)) + toy.twin(hidden),
    "the weight is that of two layers": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) + toy.twin(n),
    "up is used twice": lambda toy, hidden: toy.linear(hidden * (u := toy.up(hidden))) + u,
    "up is a gate": lambda toy, hidden: toy.linear(hidden * (u := toy.up(hidden))) + torch.sigmoid(u),
    "up meets itself": lambda toy, hidden: toy.linear((u := toy.up(hidden)) * u),
    "up scales all channels alike": lambda toy, hidden: toy.linear(hidden * toy.single(hidden)),
    "the product of up is used twice": lambda toy, hidden: toy.linear(p := hidden * toy.up(hidden)) + p,
}


SAFE = {
    "a norm that feeds linear layers": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) + toy.up(n),
    "a norm that is used twice": lambda toy, hidden: toy.linear(toy.norm(hidden)) + toy.linear(toy.norm(-hidden)),
    "a norm whose shape is looked at": lambda toy, hidden: toy.linear(n := toy.norm(hidden)) * n.shape[-1],
    "up to down": lambda toy, hidden: toy.linear(torch.sigmoid(hidden) * toy.up(hidden)),
    "up to down, the other way round": lambda toy, hidden: toy.linear(toy.up(hidden).mul(torch.sigmoid(hidden))),
}


def folded(compute, *, tied: bool) -> tuple[str, ...]:
    """The layers that are smoothed in a toy; asserts that it computes the same afterwards."""
    toy = Toy(
        compute,
        norm=nn.LayerNorm(16),
        other_norm=nn.RMSNorm(16),
        linear=nn.Linear(16, 16),
        twin=nn.Linear(16, 16),
        up=nn.Linear(16, 16),
        single=nn.Linear(16, 1),
    )
    toy.matrix = torch.randn(16, 16)
    if tied:
        toy.twin.weight = toy.linear.weight
    with torch.no_grad():
        toy.norm.weight.normal_().mul_(5)
        toy.other_norm.weight.normal_()
        toy.norm.bias.normal_()
    expected = toy(CALIBRATION[0])
    quantizer = W8A8Quantizer(smooth="shift")
    smoothed = unrounded(quantizer, toy)
    torch.testing.assert_close(smoothed(CALIBRATION[0]), expected, rtol=0, atol=2e-4)
    return smoothed_by(quantizer.quantize(toy, CALIBRATION))


@pytest.mark.parametrize("case", UNSAFE)
def test_what_also_feeds_something_else_is_not_smoothed(case):
    """A producer is divided only where every consumer is a linear layer that consumes nothing else."""
    assert folded(UNSAFE[case], tied="two layers" in case) == ()


@pytest.mark.parametrize("case", SAFE)
def test_what_feeds_linear_layers_alone_is_smoothed(case):
    """The refusals above are not for want of trying."""
    assert "linear" in folded(SAFE[case], tied=False)


def test_a_module_registered_under_two_names_is_one_module():
    """Both names lead to the same quantized layer, so what smoothing did to its norm is undone under both."""
    linear = nn.Linear(16, 16)
    toy = Toy(lambda toy, hidden: toy.second(toy.norm(hidden)), norm=nn.LayerNorm(16), first=linear, second=linear)
    smoothed = unrounded(W8A8Quantizer(), toy)
    torch.testing.assert_close(smoothed(CALIBRATION[0]), toy(CALIBRATION[0]), rtol=0, atol=2e-4)


class Odd(nn.Module):
    """A norm whose output is not proportional to its weight, nor to one plus it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, hidden):
        return hidden * torch.tanh(self.weight)


def test_a_norm_of_an_unknown_form_is_not_divided():
    """The division is checked by running the norm; what does not pass is left as it was."""
    toy = Toy(lambda toy, hidden: toy.linear(toy.norm(hidden)), norm=Odd(), linear=nn.Linear(16, 16))
    quantizer = W8A8Quantizer(smooth="shift")
    smoothed = unrounded(quantizer, toy)
    assert torch.equal(smoothed(CALIBRATION[0]), toy(CALIBRATION[0]))
    assert smoothed.norm.weight is toy.norm.weight
    assert smoothed_by(quantizer.quantize(toy, CALIBRATION)) == ()


def test_smoothing_lowers_the_error_where_activations_have_outlier_channels():
    """Outliers are planted so that the function is unchanged; the rounding error falls to less than half."""
    model = tiny("llama")
    with torch.no_grad():
        for block in model.model.layers:
            for norm, consumers in (
                (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
            ):
                norm.weight[[3, 17]] *= 60
                for consumer in consumers:
                    consumer.weight[:, [3, 17]] /= 60
    error = {
        smooth: (logits(W8A8Quantizer(smooth=smooth).quantize(model, CALIBRATION).model) - logits(model)).std()
        for smooth in (True, False)
    }
    assert error[True] < 0.5 * error[False]


def test_without_calibration_nothing_is_smoothed():
    """No prompts, no tokenizer: the quantizer still works, and says so."""
    quantizer = W8A8Quantizer()
    made = quantizer.quantize(model_of("llama"))
    quantized = made.model
    assert made.report["smoothed_layers"] == 0
    assert torch.equal(
        logits(quantized), logits(W8A8Quantizer(smooth=False).quantize(model_of("llama"), CALIBRATION).model)
    )
    made = quantizer.quantize(model_of("llama"), CALIBRATION)
    assert made.report["smoothed_layers"] == 12


# Calibration prompts


def test_the_own_prompts_are_texts_of_some_length():
    """They come with the package."""
    assert len(own_prompts()) >= 3
    assert all(prompt == prompt.strip() != "" for prompt in own_prompts())


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("a.txt", "One\nstill one.\n\n\n\nTwo.\n", ["One\nstill one.", "Two."]),
        ("a.txt", "One.\r\n\r\nTwo.", ["One.", "Two."]),
        ("a.txt", "One.\n  \nTwo.", ["One.", "Two."]),
        ("a.jsonl", '"One."\n\n{"text": "Two."}\n', ["One.", "Two."]),
        ("a.jsonl", '{"prompt": "One."}\n{"inputs_pretokenized": "Two.", "id": 3}', ["One.", "Two."]),
        ("a.jsonl", '{"prompt": "lower", "text": "first"}', ["first"]),
        ("a.jsonl", '{"text": "line\u2028separator\x85and next line"}', ["line\u2028separator\x85and next line"]),
    ],
)
def test_prompts_are_read_from_text_and_from_json_lines(tmp_path, name, content, prompts):
    """Paragraphs, or one record a line with any of the known keys."""
    path = tmp_path / name
    path.write_bytes(content.encode())
    assert prompts_from(path) == prompts_from(str(path)) == prompts
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as editors on Windows begin a file
    assert prompts_from(path) == prompts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "has no calibration prompt in it"),
        ("a.jsonl", b"", "has no calibration prompt in it"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read"),
        ("a.jsonl", b'{"text": ', "cannot be read"),
        ("a.jsonl", b'{"id": 1}', "none of the keys text, prompt, inputs_pretokenized"),
        ("a.jsonl", b"5", "cannot be read"),
        ("a.jsonl", b"null", "cannot be read"),
        ("a.jsonl", b'{"text": 5}', "cannot be read"),
        ("a.jsonl", b'["One."]', "cannot be read"),
    ],
)
def test_a_file_without_prompts_is_refused_by_name(tmp_path, name, content, message):
    """Before any model is loaded."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidRequestError) as caught:
        Pipeline.from_pretrained("nothing/there", calibration=path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused():
    """And so is a folder."""
    for path in ("missing.txt", "missing.jsonl", "."):
        with pytest.raises(InvalidRequestError, match="cannot be read from"):
            prompts_from(path)
