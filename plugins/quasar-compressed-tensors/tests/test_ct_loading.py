"""A folder that the library saved is loaded by its name, and computes what the library computes."""

from __future__ import annotations

import pytest
import torch
from made_by_the_library import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from quasar import Pipeline
from quasar.checkpoints.models import load_model
from quasar.errors import InvalidRequestError
from quasar.registry.plugins import load_plugins
from quasar.registry.registry import Registry, default_registry
from quasar.testing.models import random_prompt
from quasar.weights.linear import QuantizedLinear

CHANNEL8 = {"num_bits": 8, "strategy": "channel"}
GROUP4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "strategy": "tensor"}
W4A16 = {"group_0": {"targets": ["Linear"], "weights": GROUP4}}
W4A16_ASYMMETRIC = {"group_0": {"targets": ["Linear"], "weights": {**GROUP4, "symmetric": False}}}
W8A8 = {"group_0": {"targets": ["Linear"], "weights": CHANNEL8, "input_activations": PER_TOKEN}}
W8A8_STATIC = {"group_0": {"targets": ["Linear"], "weights": CHANNEL8, "input_activations": STATIC}}


@pytest.fixture(autouse=True)
def only_this_plugin(monkeypatch):
    """Of all installed plug-ins this one loads."""
    monkeypatch.setenv("QUASAR_PLUGINS", "quasar-compressed-tensors")
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.tensor([random_prompt(24, seed=4)])).logits


def apart(one, other):
    """How far two tensors are from each other, as a share of the second."""
    return float((one - other).norm() / other.norm())


def test_the_plug_in_is_found_by_its_entry_point():
    """And nothing is wrong with it."""
    registry = Registry(load_plugins())
    assert registry.problems() == []
    (entry,) = (
        entry for entry in registry.entries("checkpoint") if entry.origin.distribution == "quasar-compressed-tensors"
    )
    assert entry.name == "compressed-tensors"


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("groups", [W4A16, W4A16_ASYMMETRIC], ids=["symmetric", "asymmetric"])
def test_weights_alone_give_the_library_s_logits(tmp_path, groups, family, tied):
    """With biases, which qwen2 has; but for the order of sums in float32."""
    made = make_checkpoint(tmp_path, groups, family=family, tie_word_embeddings=tied)
    loaded = load_model(str(tmp_path)).model
    assert len([module for module in loaded.modules() if isinstance(module, QuantizedLinear)]) == 14
    assert not isinstance(loaded.lm_head, QuantizedLinear)
    assert apart(logits(loaded), logits(made.model)) < 1e-5


def _rounded_per_token(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    steps = inputs[0].abs().amax(-1, keepdim=True) / 127
    return ((inputs[0] / steps).round() * steps,)


def _rounded_with_the_stored_scale(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return ((inputs[0] / module.input_scale).round().clamp(-127, 127) * module.input_scale,)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("groups", "by_hand"),
    [(W8A8, _rounded_per_token), (W8A8_STATIC, _rounded_with_the_stored_scale)],
    ids=["dynamic", "static"],
)
def test_activations_are_rounded_as_the_library_rounds_them_but_to_127_steps(tmp_path, groups, by_hand, family):
    """Near the library's own logits, which have a step more; with our steps, equal to them but for sums."""
    made = make_checkpoint(tmp_path, groups, family=family)
    own, theirs = logits(load_model(str(tmp_path)).model), logits(made.model)
    layers = [module for name, module in made.linear_layers().items() if name != "lm_head"]
    for module in layers:
        module.quantization_enabled = False
    rounding = apart(logits(made.model), theirs)
    assert 0 < apart(own, theirs) < 2 * rounding
    for module in layers:
        module.register_forward_pre_hook(by_hand)
    assert apart(own, logits(made.model)) < 0.01 * rounding


@pytest.mark.parametrize("groups", [W4A16, W8A8, W8A8_STATIC], ids=["W4A16", "W8A8", "static"])
def test_drafts_do_not_change_what_the_checkpoint_says(tmp_path, groups):
    """Strictly verified; some drafts are accepted."""
    make_checkpoint(tmp_path, groups)
    pipe = Pipeline.from_pretrained(str(tmp_path), drafter="ngram:k=4,max_n=2", strict=True)
    prompt = [*random_prompt(6), *random_prompt(6)]
    result = pipe.generate_ids(prompt, max_new_tokens=60)
    assert result.token_ids == pipe.reference(prompt, max_new_tokens=60).token_ids
    assert result.stats["accepted_tokens"] > 0


def test_what_transformers_loads_itself_says_the_same(tmp_path):
    """transformers decompresses the same folder when it is first called."""
    make_checkpoint(tmp_path, W4A16)
    theirs = logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert apart(logits(load_model(str(tmp_path)).model), theirs) < 1e-5


def test_a_folder_that_lacks_a_tensor_is_refused_naming_layer_and_tensor(tmp_path):
    """Rather than filled with what was never stored."""
    make_checkpoint(tmp_path, W8A8)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequestError, match=r"layer model\.layers\.1\.mlp\.up_proj .* has no weight_scale"):
        load_model(str(tmp_path))
