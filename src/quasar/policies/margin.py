"""Margin acceptance (after MARS, arXiv 2601.15498): where the target hesitates, its second choice will do. Lossy."""

from __future__ import annotations

import attrs

from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.types import Draft, Verdict, Verification


@attrs.frozen
class MarginPolicy:
    """Accepts the target's best token, and its runner-up where it is nearly as probable. For greedy decoding.

    Args:
        margin: How far the probability (softmax of the logits) of the runner-up may lie below the best.
    """

    margin: float = 0.1
    lossless: bool = attrs.field(default=False, init=False)
    drafter_invariant: bool = attrs.field(default=False, init=False)
    uses_draft_probs: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.margin, bool | str) or not 0 <= self.margin <= 1:
            raise InvalidRequestError(f"margin: margin={self.margin!r}, expected a number from 0 to 1")

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        probs, token_ids = verification.logits.double().softmax(dim=-1).topk(2, dim=-1)
        for row, token_id in enumerate(draft.token_ids):
            best, second = token_ids[row].tolist()
            hesitates = float(probs[row, 0] - probs[row, 1]) <= self.margin
            if token_id != best and not (hesitates and token_id == second):
                return Verdict(row, sampling.choose(verification.logits[row], row))
        return Verdict(len(draft), sampling.choose(verification.logits[len(draft)], len(draft)))
