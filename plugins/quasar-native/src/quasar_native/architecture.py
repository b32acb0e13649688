"""Reads a transformers model, its configuration and its modules, into what the engine computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quasar.errors import UnsupportedModelError
from quasar.verifiers.context import chosen_length
from quasar_native import _native
from quasar_native.families import family_of
from quasar_native.weights import Weights

_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}
_FIXED_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on how long the sequence is."""


class Architecture:
    """A model of the engine, made of a transformers model.

    Attributes:
        model: The compiled model. It borrows the embedding, and holds the other weights packed.
        formats: How many products there are of each format.
        windows: Lengths of the sliding windows that its layers have.

    Raises:
        UnsupportedModelError: The engine does not compute what this model computes; the message says why.
    """

    def __init__(self, model: PreTrainedModel, instructions: str, max_length: int | None = None) -> None:
        self._family = family_of(model)
        self._config: Any = model.config
        self._weights = Weights(instructions)
        self.windows: set[int] = set()
        self._builder = _native.ModelBuilder()
        decoder: Any = model.model
        self._set_sizes(decoder)
        self._builder.max_length = chosen_length(model, max_length) or 0
        self._set_embedding(decoder.embed_tokens)
        ropes = self._add_ropes(decoder.rotary_emb)
        for index, layer in enumerate(decoder.layers):
            self._add_layer(index, layer, ropes)
        self._builder.set_final_norm(self._norm(decoder.norm))
        self._builder.set_head(*self._weights.projection([("lm_head", model.lm_head)]))
        try:
            self.model = self._builder.build()
        except ValueError as error:
            raise UnsupportedModelError(str(error)) from error
        self.formats = dict(self._weights.formats)

    def _set_sizes(self, decoder: Any) -> None:
        builder, config = self._builder, self._config
        builder.vocab, builder.hidden = decoder.embed_tokens.weight.shape
        builder.intermediate, builder.heads = config.intermediate_size, config.num_attention_heads
        builder.key_value_heads = config.num_key_value_heads
        attention = decoder.layers[0].self_attn
        builder.head_dim, builder.attention_scaling = attention.head_dim, attention.scaling
        builder.epsilon = config.rms_norm_eps
        builder.logit_soft_cap = getattr(config, "final_logit_softcapping", None) or 0.0
        if self._family.attention_soft_cap:
            builder.attention_soft_cap = attention.attn_logit_softcapping or 0.0
        activation = type(decoder.layers[0].mlp.act_fn).__name__
        if activation not in _ACTIVATIONS:
            raise UnsupportedModelError(f"the activation of its MLP is {activation}")
        builder.set_activation(_ACTIVATIONS[activation])
        if getattr(config, "use_bidirectional_attention", False):
            raise UnsupportedModelError("its attention is bidirectional")

    def _set_embedding(self, embedding: Any) -> None:
        weight: Tensor = embedding.weight.detach().contiguous()
        scale = float(embedding.embed_scale.to(weight.dtype)) if self._family.gemma else 1.0
        if weight.dtype == torch.bfloat16:
            self._builder.set_bfloat16_embedding(weight.view(torch.int16), scale)
        else:
            self._builder.set_embedding(weight.float(), scale)

    def _add_ropes(self, rotary: Any) -> dict[str, int]:
        """Index of the rotary embedding of each type of layer; ``""`` where all layers share one."""
        if not isinstance(rotary.rope_type, dict):
            return {"": self._add_rope(rotary.rope_type, rotary.inv_freq, rotary.attention_scaling)}
        return {
            kind: self._add_rope(
                rope_type, getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling")
            )
            for kind, rope_type in rotary.rope_type.items()
        }

    def _add_rope(self, rope_type: str, frequencies: Tensor, scaling: float) -> int:
        if rope_type not in _FIXED_ROPES:
            raise UnsupportedModelError(
                f"its rotary embedding is of type {rope_type!r}, whose frequencies may depend on the length"
            )
        return self._builder.add_rope(frequencies.float().contiguous(), scaling)

    def _add_layer(self, index: int, module: Any, ropes: dict[str, int]) -> None:
        layer, attention, mlp = _native.Layer(), module.self_attn, module.mlp
        name, sliding = f"layers.{index}", self._kind(index) == "sliding_attention"
        layer.window = self._window(sliding)
        self.windows |= {layer.window} - {0}
        layer.rope = ropes[self._kind(index) if "" not in ropes else ""] if getattr(attention, "use_rope", 1) else -1
        self._set_norms(layer, module)
        for put, parent, parts in (
            (layer.set_qkv, attention, ("q_proj", "k_proj", "v_proj")),
            (layer.set_attention_out, attention, ("o_proj",)),
            (layer.set_gate_up, mlp, ("gate_proj", "up_proj")),
            (layer.set_down, mlp, ("down_proj",)),
        ):
            put(*self._weights.projection([(f"{name}.{part}", getattr(parent, part)) for part in parts]))
        self._builder.add_layer(layer)

    def _kind(self, index: int) -> str:
        return self._config.layer_types[index] if self._family.windows == "layers" else ""

    def _window(self, sliding: bool) -> int:
        """Positions that a query sees; 0 for all."""
        has_window = sliding if self._family.windows == "layers" else self._family.windows == "all"
        return (self._config.sliding_window or 0) if has_window else 0

    def _set_norms(self, layer: _native.Layer, module: Any) -> None:
        layer.set_input_norm(self._norm(module.input_layernorm))
        if self._family.gemma:
            layer.set_post_attention_norm(self._norm(module.post_attention_layernorm))
            layer.set_pre_mlp_norm(self._norm(module.pre_feedforward_layernorm))
            layer.set_post_mlp_norm(self._norm(module.post_feedforward_layernorm))
        else:
            layer.set_pre_mlp_norm(self._norm(module.post_attention_layernorm))
        if self._family.head_norms:
            layer.set_query_norm(self._norm(module.self_attn.q_norm))
            layer.set_key_norm(self._norm(module.self_attn.k_norm))

    def _norm(self, norm: Any) -> Tensor:
        epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        if epsilon != self._config.rms_norm_eps:
            raise UnsupportedModelError(f"a norm's epsilon is {epsilon}, not the configuration's")
        weight: Tensor = norm.weight.detach().float()
        return 1.0 + weight if self._family.gemma else weight.contiguous()
