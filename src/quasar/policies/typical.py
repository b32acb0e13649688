"""Typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774, §3.3.2): keep what is not untypical. Lossy."""

from __future__ import annotations

import attrs
from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.types import Draft, Verdict, Verification


@attrs.frozen
class TypicalPolicy:
    """Accepts a token whose probability exceeds ``min(epsilon, alpha · exp(−entropy))`` of the target's distribution.

    Args:
        epsilon: The threshold where the target is certain.
        alpha: Scales the threshold where it is not. The defaults are those of Medusa's evaluation.
    """

    epsilon: float = 0.09
    alpha: float = 0.3
    lossless: bool = attrs.field(default=False, init=False)
    drafter_invariant: bool = attrs.field(default=False, init=False)
    uses_draft_probs: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        for name in ("epsilon", "alpha"):
            value = getattr(self, name)
            if isinstance(value, bool | str) or not value >= 0:
                raise InvalidRequestError(f"typical: {name}={value!r}, expected a number of at least 0")

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        for row, token_id in enumerate(draft.token_ids):
            probs = sampling.probabilities(verification.logits[row])
            if float(probs[token_id]) <= min(self.epsilon, self.alpha * float((-_entropy(probs)).exp())):
                return Verdict(row, sampling.draw(probs, row))
        return Verdict(len(draft), sampling.choose(verification.logits[len(draft)], len(draft)))


def _entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.clamp_min(1e-300).log()).sum()
