"""Which architectures the engine runs, and how each differs from Llama; everything else is refused with a reason.

A model is known by the classes of its modules, and by their children: a class of another name, a module more or less,
a hook, or a forward that was replaced, and it is not the architecture that was written down here.
"""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn
from transformers import PreTrainedModel

from quasar.errors import UnsupportedModelError

_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_LAYER = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_GEMMA_LAYER = _LAYER | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_MLP = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})

_CAPTURE = "transformers.utils.output_capturing"
"""transformers' own hooks, which note hidden states where they were once asked for and change nothing."""


@attrs.frozen
class Family:
    """One architecture.

    Args:
        prefix: Of the names of its classes.
        module: Of transformers, that defines them.
        head_norms: Whether queries and keys are normed, head by head.
        gemma: Norms around both halves of a layer whose weights are offsets from 1, and a scaled embedding.
        windows: Where a sliding window comes from: ``"layers"`` (only layers of that type), ``"all"`` or ``"none"``.
        attention_soft_cap: Whether it caps the scores of attention (Gemma 3 has the option, and ignores it).
    """

    prefix: str
    module: str
    head_norms: bool = False
    gemma: bool = False
    windows: str = "layers"
    attention_soft_cap: bool = False

    def class_name(self, part: str) -> str:
        return f"transformers.models.{self.module}.modeling_{self.module}.{self.prefix}{part}"


FAMILIES = {
    "llama": Family("Llama", "llama", windows="none"),
    "mistral": Family("Mistral", "mistral", windows="all"),
    "qwen2": Family("Qwen2", "qwen2"),
    "qwen3": Family("Qwen3", "qwen3", head_norms=True),
    "smollm3": Family("SmolLM3", "smollm3"),
    "gemma2": Family("Gemma2", "gemma2", gemma=True, attention_soft_cap=True),
    "gemma3_text": Family("Gemma3", "gemma3", head_norms=True, gemma=True),
}
"""By the model type of the configuration. SmolLM2 is a Llama."""


def family_of(model: PreTrainedModel) -> Family:
    """The family of a model, all of whose modules are checked.

    Raises:
        UnsupportedModelError: It is none that is written down here; the message names what is different.
    """
    family = FAMILIES.get(model.config.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(f"the model type is {model.config.model_type!r}; the engine runs {known}")
    for name, module in model.named_modules():
        _check_untouched(name or "the model", module)
    _check_structure(model, family)
    return family


def _check_untouched(name: str, module: nn.Module) -> None:
    if "forward" in vars(module):
        raise UnsupportedModelError(f"the forward of {name} was replaced")
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if any(getattr(hook, "__module__", "") != _CAPTURE for hook in hooks):
        raise UnsupportedModelError(f"{name} has hooks")
    for kind, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        if tensor.device.type != "cpu":
            raise UnsupportedModelError(f"{name}.{kind} is on {tensor.device}; the engine runs on the CPU")


def _check_structure(model: PreTrainedModel, family: Family) -> None:
    _check_class("the model", model, family.class_name("ForCausalLM"), frozenset({"model", "lm_head"}))
    decoder = model.model
    whole = family.class_name("TextModel" if family.prefix == "Gemma3" else "Model")
    _check_class("model", decoder, whole, frozenset({"embed_tokens", "layers", "norm", "rotary_emb"}))
    embedding = family.class_name("TextScaledWordEmbedding") if family.gemma else "torch.nn.modules.sparse.Embedding"
    _check_class("embed_tokens", decoder.embed_tokens, embedding, frozenset())
    _check_class("rotary_emb", decoder.rotary_emb, family.class_name("RotaryEmbedding"), frozenset())
    _check_norm("norm", decoder.norm, family)
    for index, layer in enumerate(decoder.layers):
        _check_layer(f"layers.{index}", layer, family)


def _check_layer(name: str, layer: Any, family: Family) -> None:
    _check_class(name, layer, family.class_name("DecoderLayer"), _GEMMA_LAYER if family.gemma else _LAYER)
    attention = _ATTENTION | {"q_norm", "k_norm"} if family.head_norms else _ATTENTION
    _check_class(f"{name}.self_attn", layer.self_attn, family.class_name("Attention"), attention)
    _check_class(f"{name}.mlp", layer.mlp, family.class_name("MLP"), _MLP)
    for child, module in (*layer.named_children(), *layer.self_attn.named_children()):
        if child.endswith("norm"):
            _check_norm(f"{name}.{child}", module, family)


def _check_norm(name: str, module: nn.Module, family: Family) -> None:
    _check_class(name, module, family.class_name("RMSNorm"), frozenset())


def _check_class(name: str, module: nn.Module, expected: str, children: frozenset[str]) -> None:
    kind = type(module)
    if f"{kind.__module__}.{kind.__qualname__}" != expected:
        raise UnsupportedModelError(f"{name} is a {kind.__module__}.{kind.__qualname__}, expected {expected}")
    found = {child for child, _ in module.named_children()}
    if children and found != children:
        what = ", ".join(sorted(found ^ children))
        raise UnsupportedModelError(f"{name} has other modules than {kind.__qualname__} is known to have: {what}")
