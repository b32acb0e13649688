"""Speculative sampling by rejection (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; Chen et al. 2023).

A draft token x, drawn from ``draft_probs``, is accepted with probability ``min(1, target_probs[x] / draft_probs[x])``;
after a rejection the token is drawn from the residual ``max(target_probs - draft_probs, 0)``, normalised. Then what is
emitted has exactly the target's distribution. The tokens of a seed depend on the drafter, other than with ``coupled``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quasar.errors import PluginError
from quasar.loop.noise import Floats
from quasar.loop.rows import HostRows
from quasar.loop.sampling import Sampling
from quasar.types import Draft, Verdict, Verification


class RejectionPolicy:
    """Lossless in distribution, for drafters with probabilities and without (a one-hot distribution)."""

    lossless = True
    drafter_invariant = False
    uses_draft_probs = True

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        rows, drawn_from = HostRows(verification.rows), draft_distributions(draft)
        for row, token_id in enumerate(draft.token_ids):
            target_probs = sampling.distribution(rows[row])
            draft_probs = drawn_from(row, len(target_probs))
            if sampling.uniform(row) >= acceptance_probability(target_probs, draft_probs, token_id):
                return Verdict(row, sampling.drawn(residual(target_probs, draft_probs), row, anew=True))
        k = len(draft)
        return Verdict(k, sampling.drawn(sampling.distribution(rows[k]), k, anew=True))


def acceptance_probability(target_probs: Floats, draft_probs: Floats, token_id: int) -> float:
    """``min(1, target/draft)`` of a token that was drawn from ``draft_probs`` (``[V]`` each)."""
    return min(1.0, float(target_probs[token_id]) / float(draft_probs[token_id]))


def residual(target_probs: Floats, draft_probs: Floats) -> Floats:
    """What is left of the target when the draft's share is taken out, ``[V]``, normalised.

    Where nothing is left, the distributions are equal and no token is ever rejected, but for rounding: the target then.
    """
    left = np.maximum(target_probs - draft_probs, 0)
    total = left.sum()
    return left / total if total > 0 else target_probs


def draft_distributions(draft: Draft) -> Callable[[int, int], Floats]:
    """What each token of a draft was drawn from, by its row and the target's V: ``[V]`` float64.

    Without ``probs`` it is one-hot. A drafter may have a vocabulary padded to another width: missing ids get 0, and
    ids that the target does not have are dropped, for a draft that holds one is cut there.

    Raises, where a row is asked for:
        PluginError: The drafted token itself has no probability, so it cannot have been drawn from ``probs``.
    """
    given = None if draft.probs is None else HostRows(draft.probs)

    def distribution(row: int, vocab_size: int) -> Floats:
        token_id, probs = draft.token_ids[row], np.zeros(vocab_size)
        if given is None:
            probs[token_id] = 1.0
        else:
            known = given[row][:vocab_size]
            probs[: len(known)] = known
        if not probs[token_id] > 0:
            raise PluginError(f"draft token {token_id} at row {row} has no probability in the draft's own probs")
        return probs

    return distribution
