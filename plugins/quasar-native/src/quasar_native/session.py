"""One sequence on the compiled engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quasar.types import Verification
from quasar.verifiers.session import CachedSession
from quasar_native import _native


class NativeSession(CachedSession):
    """A sequence over a cache of the engine's.

    Args:
        engine: What computes.
        model: What is computed.
        cache: What keys and values are stored in.
        prompt_ids: See :class:`quasar.verifiers.session.CachedSession`.
        features: Index of the hidden states that each name stands for, 0 for the embedding.
    """

    piece = None  # a row has the same bits wherever a prompt is cut

    def __init__(
        self,
        engine: _native.Engine,
        model: _native.Model,
        cache: str,
        prompt_ids: Sequence[int],
        features: Mapping[str, int],
    ) -> None:
        super().__init__(prompt_ids, frozenset(features))
        self._engine, self._model, self._hidden = engine, model, dict(features)
        self._cache = _native.Cache(model, cache)

    @property
    def cached_length(self) -> int:
        return self._cache.length

    def _truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def _free(self) -> None:
        self._cache = _native.Cache(self._model, "float32")

    def _forward(self, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        """``[n_logits, V]`` float32 logits, and of each feature as many rows; where no logits are wanted, all.

        Raises:
            ContextOverflowError: The tokens go beyond the model's context.
            NumericalError: A row is not finite.
        """
        n_hidden = (n_logits or len(token_ids)) if self._hidden else 0
        segment = _native.Segment(
            self._cache, torch.tensor(token_ids, dtype=torch.int32, device="cpu"), n_logits, n_hidden
        )
        logits = _empty(n_logits, self._model.vocab)
        features = {name: _empty(n_hidden, self._model.hidden) for name in self._hidden}
        hidden = [(index, features[name]) for name, index in self._hidden.items()]
        self._engine.forward(self._model, [segment], logits, hidden)
        return Verification(logits, features)


def _empty(rows: int, columns: int) -> Tensor:
    """What the engine writes to: float32 on the CPU, whatever the defaults of the process are."""
    return torch.empty((rows, columns), dtype=torch.float32, device="cpu")
