"""One sequence on the compiled engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quasar.types import Verification
from quasar.verifiers.session import CachedSession
from quasar_native import _native

_ROWS_WITH_FEATURES = 64
"""Of a prompt at a time, where each position is to be seen: the engine gives logits with it."""


class NativeSession(CachedSession):
    """A sequence over a cache of the engine's.

    Args:
        engine: The model.
        cache: What keys and values are stored in.
        prompt_ids: See :class:`quasar.verifiers.session.CachedSession`.
        features: ``"hidden:-1"``, or nothing.
    """

    def __init__(
        self, engine: _native.Model, cache: str, prompt_ids: Sequence[int], features: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(prompt_ids, features)
        self.piece = _ROWS_WITH_FEATURES if features else None
        self._engine = engine
        self._cache = _native.Session(engine, cache)

    @property
    def cached_length(self) -> int:
        return self._cache.length

    def _truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def _free(self) -> None:
        self._cache = _native.Session(self._engine, "float32")

    def _forward(self, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        """``[n_logits, V]`` float32 logits.

        Raises:
            ContextOverflowError: The tokens go beyond the model's context.
            NumericalError: A row is not finite.
        """
        n_rows = len(token_ids) if self.features and not n_logits else n_logits
        logits = _empty(n_rows, self._engine.vocab)
        features = {name: _empty(n_rows, self._engine.hidden) for name in sorted(self.features)}
        hidden = next(iter(features.values()), None)
        self._cache.forward(torch.tensor(token_ids, dtype=torch.int32, device="cpu"), logits, hidden)
        return Verification(logits, features)


def _empty(rows: int, columns: int) -> torch.Tensor:
    """What the engine writes to: float32 on the CPU, whatever the defaults of the process are."""
    return torch.empty((rows, columns), dtype=torch.float32, device="cpu")
