"""Block verification (Sun et al. 2025, arXiv 2403.10444, Algorithm 2): the whole draft is judged at once.

``p_i`` is the probability to which the first i tokens could still be kept, ``h_i`` the chance with which they are if no
longer prefix is; the longest prefix whose own uniform number is below its ``h_i`` is kept. It accepts no fewer tokens
than rejection token by token, with the same distribution; the same number where the draft is deterministic.
"""

from __future__ import annotations

from torch import Tensor

from quasar.loop.sampling import Sampling
from quasar.policies.rejection import draft_distribution
from quasar.types import Draft, Verdict, Verification


class BlockPolicy:
    """Lossless in distribution; for drafters that give probabilities."""

    lossless = True
    drafter_invariant = False
    uses_draft_probs = True

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        k = len(draft)
        target_probs = sampling.probabilities(verification.logits)
        draft_probs = [draft_distribution(draft, row, target_probs[row]) for row in range(k)]
        keep = prefix_weights(draft, target_probs, draft_probs)
        chances = keep_probabilities(keep, target_probs, draft_probs)
        numbers = sampling.uniforms(k)
        n = max((i for i in range(1, k + 1) if numbers[i - 1] < chances[i - 1]), default=0)
        rest = target_probs[k] if n == k else block_residual(keep[n], target_probs[n], draft_probs[n])
        return Verdict(n, sampling.draw(rest, n, anew=True))


def prefix_weights(draft: Draft, target_probs: Tensor, draft_probs: list[Tensor]) -> list[float]:
    """``p_0 … p_k``: ``p_i = min(1, p_{i-1} · target(x_i) / draft(x_i))``."""
    weights = [1.0]
    for row, token_id in enumerate(draft.token_ids):
        ratio = float(target_probs[row, token_id]) / float(draft_probs[row][token_id])
        weights.append(min(1.0, weights[-1] * ratio))
    return weights


def keep_probabilities(keep: list[float], target_probs: Tensor, draft_probs: list[Tensor]) -> list[float]:
    """``h_1 … h_k``; ``h_k = p_k``."""
    k = len(draft_probs)
    chances = []
    for i in range(1, k):
        left = float((keep[i] * target_probs[i] - draft_probs[i]).clamp_min(0).sum())
        total = left + 1 - keep[i]
        chances.append(left / total if total > 0 else 0.0)
    return [*chances, keep[k]] if k else []


def block_residual(weight: float, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What to draw from after a prefix that ends the kept part, ``[V]``, normalised."""
    left = (weight * target_probs - draft_probs).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else target_probs
