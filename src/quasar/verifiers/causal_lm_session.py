"""One sequence of a transformers causal LM, over a cache that is rolled back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from transformers import Cache, PreTrainedModel

from quasar.types import Verification
from quasar.verifiers.attention import attending_by_rows
from quasar.verifiers.cache import new_cache, roll_back
from quasar.verifiers.invariance import WIDTHS
from quasar.verifiers.session import CachedSession

_WIDEST = max(WIDTHS)


class CausalLMSession(CachedSession):
    """One sequence over a cache of transformers'.

    Args:
        model: Able to attend by rows, where its attention is replaceable.
        prompt_ids: See :class:`quasar.verifiers.session.CachedSession`.
        hidden: Index of the hidden states of each feature.
    """

    def __init__(self, model: PreTrainedModel, prompt_ids: Sequence[int], hidden: Mapping[str, int]) -> None:
        super().__init__(prompt_ids, frozenset(hidden))
        self._model, self._hidden = model, hidden
        self._cache = new_cache()

    @property
    def cached_length(self) -> int:
        return self._cache.get_seq_length()

    def _truncate(self, length: int) -> None:
        roll_back(self._cache, length)

    def _free(self) -> None:
        self._cache = new_cache()

    def _forward(self, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        return self._append(self._cache, token_ids, n_logits, as_prompt=as_prompt)

    def _append(self, cache: Cache, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        """The same for a cache by name. What is no prompt is split where it is wider than strictness is tried at."""
        if as_prompt or len(token_ids) <= _WIDEST:
            return self._run(cache, token_ids, n_logits, as_prompt=as_prompt)
        first, computed = len(token_ids) - n_logits, []
        for begin in range(0, len(token_ids), _WIDEST):
            piece = token_ids[begin : begin + _WIDEST]
            n_rows = min(len(piece), max(0, begin + len(piece) - first))
            found = self._run(cache, piece, n_rows, as_prompt=False)
            if n_rows > 0 or n_logits == 0:
                computed.append(found)
        return joined(computed)

    @torch.no_grad()
    def _run(self, cache: Cache, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        # No attention mask is passed: nothing is padded, and the model then makes the causal mask from the length of
        # the cache, aligned to its end (bottom-right).
        with nullcontext() if as_prompt else attending_by_rows():
            output = self._model(
                input_ids=torch.tensor([token_ids], dtype=torch.int64, device=self._model.device),
                cache=cache,
                use_cache=True,
                logits_to_keep=max(1, n_logits),
                output_hidden_states=bool(self._hidden),
            )
        n_rows = n_logits or len(token_ids)
        features = {name: output.hidden_states[index][0, -n_rows:] for name, index in self._hidden.items()}
        return Verification(output.logits[0], features)


def joined(computed: Sequence[Verification]) -> Verification:
    """What several forwards say of positions in a row, as if one had said it."""
    if len(computed) == 1:
        return computed[0]
    names = computed[0].features
    features = {name: torch.cat([one.features[name] for one in computed]) for name in names}
    return Verification(torch.cat([one.logits for one in computed]), features)
