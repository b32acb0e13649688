"""Hypothesis strategies: tokens, distributions, drafts, languages, tiny models."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from quasar.testing.models import FAMILIES, tiny
from quasar.types import Draft


def token_ids(vocab_size: int, *, min_size: int = 1, max_size: int = 8) -> st.SearchStrategy[tuple[int, ...]]:
    """Sequences of ids below ``vocab_size``; e.g. ``(0, 3, 3)``."""
    return st.lists(st.integers(0, vocab_size - 1), min_size=min_size, max_size=max_size).map(tuple)


@st.composite
def distributions(draw: st.DrawFn, size: int) -> Tensor:
    """``[size]`` float64 that sum to 1, with zeros, ties and one-hot rows among them; e.g. ``(0, 1/3, 2/3)``."""
    weights = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any))
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


@st.composite
def drafts(draw: st.DrawFn, vocab_size: int, *, max_tokens: int = 6) -> Draft:
    """Drafts of 0 to ``max_tokens`` tokens: without probabilities, or with rows in which each token has some."""
    tokens = draw(token_ids(vocab_size, min_size=0, max_size=max_tokens))
    if not tokens or draw(st.booleans()):
        return Draft(tokens)
    rows = torch.stack([draw(distributions(vocab_size)) for _ in tokens])
    rows[range(len(tokens)), list(tokens)] += 0.25
    return Draft(tokens, rows / rows.sum(dim=1, keepdim=True))


class Language:
    """A distribution over the next token for every context, drawn when it is first asked for: the tree of all texts."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Tensor]], Tensor], vocab_size: int) -> None:
        self._draw, self._rows, self.vocab_size = draw, dict[tuple[int, ...], Tensor](), vocab_size

    def __call__(self, context: tuple[int, ...]) -> Tensor:
        """``[vocab_size]`` float64 probabilities of the token after ``context``."""
        if context not in self._rows:
            self._rows[context] = self._draw(distributions(self.vocab_size))
        return self._rows[context]


def languages(vocab_size: int) -> st.SearchStrategy[Language]:
    """Languages over ``vocab_size`` tokens, for proofs that enumerate every text."""
    return st.data().map(lambda data: Language(data.draw, vocab_size))


def tiny_models(families: tuple[str, ...] = tuple(FAMILIES)) -> st.SearchStrategy[PreTrainedModel]:
    """Random models of the families of :data:`quasar.testing.models.FAMILIES`."""
    return st.builds(tiny, st.sampled_from(families), seed=st.integers(0, 99))


@attrs.frozen
class Turn:
    """What a loop does with a draft: how long it may be, how much of it is kept, and the token that follows."""

    max_tokens: int
    n_kept: int
    next_token: int


def dialogues(vocab_size: int) -> st.SearchStrategy[tuple[Turn, ...]]:
    """Several turns of any outcome: nothing kept, a part, everything, a budget of 0."""
    turn = st.builds(Turn, st.integers(0, 8), st.integers(0, 8), st.integers(0, vocab_size - 1))
    return st.lists(turn, min_size=1, max_size=6).map(tuple)
