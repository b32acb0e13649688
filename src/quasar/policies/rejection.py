"""Speculative sampling by rejection (Leviathan et al. 2023, arXiv 2211.17192, Algorithm 1; Chen et al. 2023).

A draft token x, drawn from ``draft_probs``, is accepted with probability ``min(1, target_probs[x] / draft_probs[x])``;
after a rejection the token is drawn from the residual ``max(target_probs - draft_probs, 0)``, normalised. Then what is
emitted has exactly the target's distribution. The tokens of a seed depend on the drafter, other than with ``coupled``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quasar.errors import PluginError
from quasar.loop.sampling import Sampling
from quasar.types import Draft, Verdict, Verification


class RejectionPolicy:
    """Lossless in distribution, for drafters with probabilities and without (a one-hot distribution)."""

    lossless = True
    drafter_invariant = False
    uses_draft_probs = True

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        for row, token_id in enumerate(draft.token_ids):
            target_probs = sampling.probabilities(verification.logits[row])
            draft_probs = draft_distribution(draft, row, target_probs)
            if sampling.uniform(row) >= acceptance_probability(target_probs, draft_probs, token_id):
                return Verdict(row, sampling.draw(residual(target_probs, draft_probs), row, anew=True))
        k = len(draft)
        return Verdict(k, sampling.draw(sampling.probabilities(verification.logits[k]), k, anew=True))


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor, token_id: int) -> float:
    """``min(1, target/draft)`` of a token that was drawn from ``draft_probs`` (``[V]`` each)."""
    return min(1.0, float(target_probs[token_id]) / float(draft_probs[token_id]))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """What is left of the target when the draft's share is taken out, ``[V]``, normalised.

    Where nothing is left, the distributions are equal and no token is ever rejected, but for rounding: the target then.
    """
    left = (target_probs - draft_probs).clamp_min(0)
    total = left.sum()
    return left / total if total > 0 else target_probs


def draft_distribution(draft: Draft, row: int, like: Tensor) -> Tensor:
    """Row ``row`` of what the draft was drawn from, ``[V]`` float64 with the target's V.

    Without ``probs`` it is one-hot. A drafter may have a vocabulary padded to another width: missing ids get 0, and
    ids that the target does not have are dropped, for a draft that holds one is cut there.

    Raises:
        PluginError: The drafted token itself has no probability, so it cannot have been drawn from ``probs``.
    """
    probs = torch.zeros_like(like)
    if draft.probs is None:
        probs[draft.token_ids[row]] = 1.0
    else:
        given = draft.probs[row].to(probs)[: probs.shape[0]]
        probs[: given.shape[0]] = given
    if not float(probs[draft.token_ids[row]]) > 0:
        raise PluginError(
            f"draft token {draft.token_ids[row]} at row {row} has no probability in the draft's own probs"
        )
    return probs
