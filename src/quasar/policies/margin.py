"""Margin acceptance (after MARS, arXiv 2601.15498): where the target hesitates, its second choice will do. Lossy."""

from __future__ import annotations

import attrs
import numpy as np

from quasar.loop.noise import Floats
from quasar.loop.rows import HostRows, best_place
from quasar.loop.sampling import Sampling
from quasar.options import number, option
from quasar.types import Draft, Verdict, Verification


@attrs.frozen
class MarginPolicy:
    """Accepts the target's best token, and its runner-up where it is nearly as probable. For greedy decoding.

    Args:
        margin: How far the probability (softmax of the logits) of the runner-up may lie below the best.
    """

    called = "margin"
    margin: float = option(0.1, number(at_least=0, at_most=1))
    lossless: bool = attrs.field(default=False, init=False)
    drafter_invariant: bool = attrs.field(default=False, init=False)
    uses_draft_probs: bool = attrs.field(default=False, init=False)

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        rows = HostRows(verification.rows)
        for row, token_id in enumerate(draft.token_ids):
            if not self._accepts(rows[row], token_id):
                return Verdict(row, sampling.chosen(rows[row], row))
        return Verdict(len(draft), sampling.chosen(rows[len(draft)], len(draft)))

    def _accepts(self, logits: Floats, token_id: int) -> bool:
        best = best_place(logits)
        if token_id == best:
            return True
        others = logits.copy()
        others[best] = -np.inf
        if int(others.argmax()) != token_id or others[token_id] == -np.inf:
            return False
        weights = np.exp(logits.astype(np.float64) - float(logits[best]))
        return bool(1 - weights[token_id] <= self.margin * weights.sum())
