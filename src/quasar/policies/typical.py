"""Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774, §3.3.2): keep what is not untypical. Lossy."""

from __future__ import annotations

import math

import attrs
import numpy as np

from quasar.loop.noise import Floats
from quasar.loop.rows import HostRows
from quasar.loop.sampling import Sampling
from quasar.options import number, option
from quasar.types import Draft, Verdict, Verification


@attrs.frozen
class TypicalPolicy:
    """Accepts a token whose probability exceeds ``min(epsilon, alpha · exp(−entropy))`` of the target's distribution.

    Args:
        epsilon: The threshold where the target is certain.
        alpha: Scales the threshold where it is not. The defaults are those of Medusa's evaluation.
    """

    called = "typical"
    epsilon: float = option(0.09, number(at_least=0))
    alpha: float = option(0.3, number(at_least=0))
    lossless: bool = attrs.field(default=False, init=False)
    drafter_invariant: bool = attrs.field(default=False, init=False)
    uses_draft_probs: bool = attrs.field(default=False, init=False)

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        rows = HostRows(verification.rows)
        for row, token_id in enumerate(draft.token_ids):
            probs = sampling.distribution(rows[row])
            if float(probs[token_id]) <= min(self.epsilon, self.alpha * math.exp(-_entropy(probs))):
                return Verdict(row, sampling.drawn(probs, row))
        return Verdict(len(draft), sampling.chosen(rows[len(draft)], len(draft)))


def _entropy(probs: Floats) -> float:
    some = probs[probs > 0]
    return float(-(some * np.log(some)).sum())
