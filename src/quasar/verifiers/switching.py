"""Models whose rotary embedding is another one from some length on (longrope), verified across that length.

transformers chooses the frequencies of a whole call by its largest position. Decoding one token a step, that is the
newest one: a row at or behind the switch has the long frequencies for all its keys, a row before it the short ones. So
two caches are kept, of the same positions with either frequencies, and each row is computed over the one that it needs:
what a row says depends on its position and its past, whatever is drafted beside it. It is what a forward over the whole
past says, and what ``generate`` of Phi-3 does, which computes the prompt anew at the switch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quasar.loop.prefix import common_prefix_length
from quasar.types import Verification
from quasar.verifiers.cache import new_cache, roll_back
from quasar.verifiers.causal_lm_session import CausalLMSession, joined
from quasar.verifiers.context import rotary_embeddings
from quasar.weights.layers import replace_module

_is_long: ContextVar[bool] = ContextVar("quasar_long_embedding", default=False)


@contextmanager
def _long_embeddings(is_long: bool) -> Iterator[None]:
    token = _is_long.set(is_long)
    try:
        yield
    finally:
        _is_long.reset(token)


class SwitchedEmbedding(nn.Module):
    """A rotary embedding in both its forms, neither of which changes any more."""

    def __init__(self, rotary: nn.Module, switch: int) -> None:
        super().__init__()
        self.short, self.long = _settled(rotary, switch - 1), _settled(rotary, switch)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """As the embedding itself."""
        return (self.long if _is_long.get() else self.short)(*arguments, **options)


@torch.no_grad()
def _settled(rotary: nn.Module, largest: int) -> nn.Module:
    own: Any = copy.deepcopy(rotary)
    device = own.inv_freq.device
    like = torch.empty((1, 1, 1), dtype=torch.float32, device=device)
    own(like, torch.tensor([[largest]], dtype=torch.int64, device=device))  # it sets its frequencies
    own.rope_type = "default"  # and is not to set them again
    return own  # type: ignore[no-any-return]


def use_switched_embeddings(model: PreTrainedModel, switch: int) -> bool:
    """Let ``model`` have both embeddings at hand; ``False``, and nothing is changed, where it has more than two.

    Args:
        model: It shares its tensors with nobody's modules.
        switch: The first position that is embedded otherwise.
    """
    found = list(rotary_embeddings(model))
    if not all(getattr(rotary, "rope_type", None) == "longrope" for _, rotary in found):
        return False
    for name, rotary in found:
        replace_module(model, name, SwitchedEmbedding(rotary, switch))
    return True


class SwitchingSession(CausalLMSession):
    """One sequence over two caches: one with the short embedding up to the switch, one with the long one.

    Args:
        model: With embeddings of :func:`use_switched_embeddings`.
        prompt_ids: See :class:`quasar.verifiers.session.CachedSession`.
        hidden: Index of the hidden states of each feature.
        switch: The first position whose row has the long embedding.
    """

    def __init__(
        self, model: PreTrainedModel, prompt_ids: Sequence[int], hidden: Mapping[str, int], switch: int
    ) -> None:
        super().__init__(model, prompt_ids, hidden)
        self._switch, self._long_cache = switch, new_cache()

    @property
    def cached_length(self) -> int:
        return max(self._cache.get_seq_length(), self._long_cache.get_seq_length())

    def restart(self, token_ids: Sequence[int]) -> None:
        common = common_prefix_length(self._token_ids, token_ids)
        any_long = self._is_long(len(self._token_ids)) or self._is_long(len(token_ids))
        if any_long and (common < self._switch or not self._long_cache.get_seq_length()):
            self._truncate(0)
        super().restart(token_ids)

    def _is_long(self, length: int) -> bool:
        """Whether the last of so many tokens has a row with the long embedding."""
        return length > self._switch

    def _truncate(self, length: int) -> None:
        roll_back(self._cache, length)
        if length < self._switch:  # computed anew when it is needed, in the same pieces
            self._long_cache = new_cache()
        roll_back(self._long_cache, length)

    def _free(self) -> None:
        super()._free()
        self._long_cache = new_cache()

    def _forward(self, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        begin = self.cached_length
        known = [*self._token_ids[:begin], *token_ids]
        end = begin if self._is_long(len(self._token_ids)) else min(len(known), self._switch)
        computed = []
        if end > begin:
            n_rows = max(0, n_logits - (len(known) - end))
            with _long_embeddings(False):
                found = self._append(self._cache, known[begin:end], n_rows, as_prompt=as_prompt)
            computed += [found] if n_rows > 0 or n_logits == 0 else []
        if len(known) > end:
            with _long_embeddings(True):
                self._catch_up(known, end)
                n_rows = min(n_logits, len(known) - end)
                computed.append(self._append(self._long_cache, known[end:], n_rows, as_prompt=as_prompt))
        return joined(computed)

    def _catch_up(self, known: Sequence[int], end: int) -> None:
        """Compute the long embedding's keys and values of what has only the short one's, in pieces as of a prompt."""
        assert self.piece is not None
        while (begin := self._long_cache.get_seq_length()) < end:
            piece_end = min(end, (begin // self.piece + 1) * self.piece)
            self._append(self._long_cache, known[begin:piece_end], 0, as_prompt=True)
