"""One sequence on the compiled engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quasar.loop.prefix import common_prefix_length
from quasar.types import Draft, Verification
from quasar_native import _native


class NativeSession:
    """A sequence's committed tokens, and a cache of all of them but the last."""

    def __init__(self, engine: _native.Model, cache: str, prompt_ids: Sequence[int], with_hidden_states: bool) -> None:
        self._engine, self._with_hidden_states = engine, with_hidden_states
        self._cache = _native.Session(engine, cache)
        self._token_ids: list[int] = []
        self.restart(prompt_ids)

    @property
    def cached_length(self) -> int:
        """Positions in the cache; between steps one less than the committed tokens."""
        return self._cache.length

    def verify(self, draft: Draft) -> Verification:
        """``[k+1, V]`` float32 logits.

        Raises:
            ContextOverflowError: The draft goes beyond the model's context.
            NumericalError: A row is not finite.
        """
        self._cache.truncate(len(self._token_ids) - 1)  # in case the last draft was verified but never judged
        return self._forward((*self._token_ids[self.cached_length :], *draft.token_ids), len(draft) + 1)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        self._cache.truncate(len(self._token_ids) - 1)

    def restart(self, token_ids: Sequence[int]) -> None:
        """Become the session of ``token_ids``, keeping what is cached of a common beginning."""
        cached = min(common_prefix_length(self._token_ids, token_ids), self.cached_length, len(token_ids) - 1)
        self._cache.truncate(cached)
        self._token_ids = list(token_ids)
        if missing := self._token_ids[cached:-1]:
            self._forward(missing, 0)

    def _forward(self, token_ids: Sequence[int], n_logits: int) -> Verification:
        logits = torch.empty(n_logits, self._engine.vocab)
        hidden = torch.empty(n_logits, self._engine.hidden) if self._with_hidden_states else None
        self._cache.forward(torch.tensor(token_ids, dtype=torch.int32), logits, hidden)
        return Verification(logits, hidden)
