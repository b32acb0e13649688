"""The logits processors behind the settings of a request, on the few entries of a row that they change.

Their scores are bit for bit those of transformers' processors of the same names. They write into the scores that they
are given, which the loop has copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor


@attrs.frozen
class RepetitionPenalty:
    """Divides the positive logits, and multiplies the negative ones, of tokens that occurred (arXiv 1909.05858)."""

    penalty: float

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        row = scores[0]
        occurred = _within(input_ids[0], row)
        some = row[occurred]
        row[occurred] = torch.where(some < 0, some * self.penalty, some / self.penalty)
        return scores


@attrs.frozen
class NoRepeatNgram:
    """Forbids each token that would complete an n-gram that occurred."""

    n: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token_ids, row = input_ids[0], scores[0]
        windows = len(token_ids) - self.n + 1
        if windows > 0:
            completed = torch.ones(windows, dtype=torch.bool, device=token_ids.device)
            for i in range(self.n - 1):
                completed &= token_ids[i : i + windows] == token_ids[windows + i]
            row[_within(token_ids[self.n - 1 :][completed], row)] = -float("inf")
        return scores


@attrs.frozen
class MinNewTokens:
    """Forbids the tokens that end the output until there are enough new ones."""

    prompt_length: int
    least: int
    eos_token_ids: Sequence[int]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] - self.prompt_length < self.least:
            row = scores[0]
            row[_within(torch.tensor(self.eos_token_ids, device=row.device), row)] = -float("inf")
        return scores


def _within(token_ids: Tensor, row: Tensor) -> Tensor:
    """The ids that the row has: a prompt may hold others, where embeddings outnumber logits."""
    return token_ids[(token_ids >= 0) & (token_ids < len(row))]
