"""Greedy verification: keep draft tokens while they are the target's argmax."""

from __future__ import annotations

from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.types import Draft, Verdict, Verification


class GreedyPolicy:
    """Accepts the leading draft tokens that equal the target's argmax; ties go to the lowest id.

    Leviathan et al. 2023 (arXiv 2211.17192) at temperature → 0. Lossless: the output is the target's greedy output.
    """

    lossless = True
    drafter_invariant = True
    uses_draft_probs = False

    def check_sampling(self, sampling: Sampling) -> None:
        if not sampling.is_greedy:
            raise InvalidRequestError(
                f"temperature={sampling.temperature}, but the policy 'greedy' never samples; use 'auto', 'coupled', "
                "'rejection' or 'block'"
            )

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        self.check_sampling(sampling)
        for row, token_id in enumerate(sampling.choose_rows(verification.rows)):
            if row == len(draft) or draft.token_ids[row] != token_id:
                return Verdict(row, token_id)
        raise AssertionError("logits have a row more than the draft has tokens")
