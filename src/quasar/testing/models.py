"""Tiny random models of many architectures, made so that greedy decoding says something.

transformers' default ``initializer_range`` of 0.02 gives flat logits and outputs of few distinct tokens. Biases start
at zero and norm weights at one (or zero), where a test of them could not fail; so they are filled with noise here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
import transformers
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

VOCAB_SIZE = 64

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_MIXED_WINDOWS = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}


@attrs.frozen
class Family:
    """How to make a tiny model of one architecture.

    Args:
        config: Name of the configuration class in transformers.
        model: Name of the model class.
        options: What its configuration has beyond, or other than, the common part.
        attentions: Implementations of attention that it offers.
        replaceable: Whether its attention can be replaced, by transformers' attention interface.
    """

    config: str
    model: str
    options: dict[str, Any] = attrs.Factory(dict)
    attentions: tuple[str, ...] = ("sdpa", "eager")
    replaceable: bool = True


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", {"n_inner": 128}),
    "mistral_window": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "gemma2": Family("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 8}, ("eager",)),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", _MIXED_WINDOWS),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXForCausalLM"),
    "phi3": Family("Phi3Config", "Phi3ForCausalLM"),
    "opt": Family("OPTConfig", "OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.2}),
    "bloom": Family("BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}, ("eager",), replaceable=False),
    "gpt_neo": Family(
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        ("eager",),
        replaceable=False,
    ),
    "falcon_alibi": Family("FalconConfig", "FalconForCausalLM", {"alibi": True}, ("sdpa", "eager"), replaceable=False),
}
WINDOWED = ("mistral_window", "gemma2", "gemma3", "gpt_neo")


def tiny(
    family: str, *, seed: int = 0, attention: str | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> PreTrainedModel:
    """A model of :data:`FAMILIES` in evaluation mode, whose generation never ends by itself.

    Args:
        attention: Implementation; ``None``: the first that the family offers.
        options: Go into the configuration.
    """
    kind = FAMILIES[family]
    config = getattr(transformers, kind.config)(**{**_COMMON, **kind.options, **options})
    config._attn_implementation = attention or kind.attentions[0]
    torch.manual_seed(seed)
    model = getattr(transformers, kind.model)(config).eval()
    with torch.no_grad():
        for module in model.modules():
            _add_noise(module)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.to(dtype)  # type: ignore[no-any-return]


def _add_noise(module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name == "bias":
            parameter.normal_(std=0.3)
        elif parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)


def random_prompt(length: int, seed: int = 1) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), device="cpu", generator=generator).tolist()


def greedy(model: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int = 40, **options: Any) -> list[int]:
    """The new tokens of transformers' own greedy decoding: the gold of these tests."""
    inputs = torch.tensor([list(prompt_ids)], dtype=torch.int64, device=model.device)
    output: torch.Tensor = model.generate(  # type: ignore[operator]
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False, **options
    )
    return output[0, len(prompt_ids) :].tolist()
