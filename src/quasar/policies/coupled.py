"""Coupled sampling: the target draws its token with noise fixed by position, whatever was drafted.

Gumbel-max with shared noise (Daliri, Musco, Suresh 2024, "Coupling without Communication and Drafter-Invariant
Speculative Decoding", arXiv 2408.07978): the token of a position is a function of the target's distribution and of the
noise there; a draft token is accepted when it is that token. So the output does not depend on the drafter, nor on k,
and equals plain sampling token by token. A stochastic drafter that draws with the same noise is accepted most.
"""

from __future__ import annotations

from quasar.loop.sampling import Sampling
from quasar.types import Draft, Verdict, Verification


class CoupledPolicy:
    """Lossless, and drafter-invariant: the same seed gives the same tokens with any drafter."""

    lossless = True
    drafter_invariant = True
    uses_draft_probs = False

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        for row, token_id in enumerate(sampling.choose_rows(verification.rows)):
            if row == len(draft) or draft.token_ids[row] != token_id:
                return Verdict(row, token_id)
        raise AssertionError("logits have a row more than the draft has tokens")
