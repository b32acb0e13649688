"""A key-value cache that can be rolled back, for any model whose attention uses transformers' ``Cache``.

Keys and values are written into a buffer that grows by doubling; rolling back is forgetting the end of it, exact for
every kind of attention. Sliding-window and chunked layers keep all positions too and leave the window to the attention
mask: transformers' own windowed layers evict keys that a rollback would need again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quasar.errors import UnsupportedModelError

_FIRST_CAPACITY = 256


class RollbackLayer(DynamicLayer):
    """Keys and values ``[B, H, T, D]`` of one attention layer, as views of the buffers that hold them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[B, H, t, D]`` states; returns views of everything cached, valid until the next update."""
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        self._key_buffer = _with_room(self._key_buffer, key_states, begin, end)
        self._value_buffer = _with_room(self._value_buffer, value_states, begin, end)
        self._key_buffer[..., begin:end, :] = key_states
        self._value_buffer[..., begin:end, :] = value_states
        self.keys = self._key_buffer[..., :end, :]
        self.values = self._value_buffer[..., :end, :]
        self.device, self.is_initialized = key_states.device, True
        return self.keys, self.values


def _with_room(buffer: Tensor | None, states: Tensor, used: int, needed: int) -> Tensor:
    if buffer is not None and buffer.shape[-2] >= needed:
        return buffer
    capacity = _FIRST_CAPACITY
    while capacity < needed:
        capacity *= 2
    grown = states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))
    if buffer is not None:
        grown[..., :used, :] = buffer[..., :used, :]
    return grown


def new_cache() -> Cache:
    """An empty cache for one sequence."""
    return Cache(layer_class_to_replicate=RollbackLayer)


def roll_back(cache: Cache, length: int) -> None:
    """Forget everything after the first ``length`` positions."""
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)


def check_can_roll_back(model: PreTrainedModel) -> None:
    """Refuse, by name, a model with a state that cannot be rolled back.

    Raises:
        UnsupportedModelError: Recurrent, hybrid or encoder-decoder models, a layer with a cache of its own kind, or a
            model without a cache.
    """
    name = described(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; Quasar decodes decoder-only models")
    if not model.can_generate():
        raise UnsupportedModelError(f"{name} does not generate text; give a causal LM (…ForCausalLM)")
    if not hasattr(model.config.get_text_config(), "num_hidden_layers"):
        raise UnsupportedModelError(
            f"{name} says nothing of a key-value cache, which must be rolled back to the last accepted token: its "
            "configuration lacks num_hidden_layers; add it if the model uses transformers' Cache, or write a verifier"
        )
    layers = DynamicCache(config=model.config).layers
    foreign = sorted({type(layer).__name__ for layer in layers} - _KNOWN_LAYERS)
    if model._is_stateful or foreign:
        kept = f"layers of kind {', '.join(foreign)}" if foreign else "a recurrent state"
        raise UnsupportedModelError(
            f"{name} keeps {kept}, which cannot be rolled back to the last accepted token; speculative decoding needs "
            "a model whose layers all cache keys and values"
        )


def described(model: PreTrainedModel) -> str:
    """A model in a message that refuses it."""
    return f"{type(model).__name__} (model type {model.config.model_type!r})"


_KNOWN_LAYERS = {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
