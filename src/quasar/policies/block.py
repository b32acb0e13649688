"""Block verification (Sun et al. 2025, arXiv 2403.10444, Algorithm 2): the whole draft is judged at once.

``p_i`` is the probability to which the first i tokens could still be kept, ``h_i`` the chance with which they are if no
longer prefix is; the longest prefix whose own uniform number is below its ``h_i`` is kept. It accepts no fewer tokens
than rejection token by token, with the same distribution; the same number where the draft is deterministic.
"""

from __future__ import annotations

import numpy as np

from quasar.errors import QuasarError
from quasar.loop.noise import Floats
from quasar.loop.rows import HostRows
from quasar.loop.sampling import Sampling
from quasar.policies.rejection import draft_distributions
from quasar.types import Draft, Verdict, Verification


class BlockPolicy:
    """Lossless in distribution; for drafters that give probabilities."""

    lossless = True
    drafter_invariant = False
    uses_draft_probs = True

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        rows, drawn_from = HostRows(verification.rows), draft_distributions(draft)
        target_probs: list[Floats] = []
        draft_probs: list[Floats] = []
        keep, k = [1.0], 0
        while k < len(draft) and keep[k] > 0:
            try:
                target_probs.append(sampling.distribution(rows[k]))
            except QuasarError:
                break  # a dead end: no token can follow, and it is an error only if the kept part ends here
            draft_probs.append(drawn_from(k, len(target_probs[k])))
            keep.append(next_weight(keep[k], draft.token_ids[k], target_probs[k], draft_probs[k]))
            k += 1
        chances = keep_probabilities(keep, target_probs, draft_probs)
        numbers = sampling.uniforms(k)
        n = max((i for i in range(1, k + 1) if numbers[i - 1] < chances[i - 1]), default=0)
        rest = sampling.distribution(rows[k]) if n == k else block_residual(keep[n], target_probs[n], draft_probs[n])
        return Verdict(n, sampling.drawn(rest, n, anew=True))


def next_weight(weight: float, token_id: int, target_probs: Floats, draft_probs: Floats) -> float:
    """``p_i = min(1, p_{i-1} · target(x_i) / draft(x_i))``; ``p_0`` is 1."""
    return min(1.0, weight * (float(target_probs[token_id]) / float(draft_probs[token_id])))


def keep_probabilities(keep: list[float], target_probs: list[Floats], draft_probs: list[Floats]) -> list[float]:
    """``h_1 … h_k`` of ``p_0 … p_k``; ``h_k = p_k``."""
    k = len(draft_probs)
    chances = []
    for i in range(1, k):
        left = float(np.maximum(keep[i] * target_probs[i] - draft_probs[i], 0).sum())
        total = left + 1 - keep[i]
        chances.append(left / total if total > 0 else 0.0)
    return [*chances, keep[k]] if k else []


def block_residual(weight: float, target_probs: Floats, draft_probs: Floats) -> Floats:
    """What to draw from after a prefix that ends the kept part, ``[V]``, normalised."""
    left = np.maximum(weight * target_probs - draft_probs, 0)
    total = left.sum()
    return left / total if total > 0 else target_probs
