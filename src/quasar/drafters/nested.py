"""A whole inner loop as a drafter: the cascade.

Drafter and verifier of the inner loop propose a block to the target of the outer loop, which verifies it in one
forward; the outer loop does not know that its drafter is one. With a quantized copy of the target inside, most blocks
are confirmed whole, so the target runs once for 16 to 32 tokens and its own output comes out. (Staged and cascaded
speculation: Spector & Re 2023, arXiv 2308.04623; Chen et al. 2023, arXiv 2312.11462.)

The inner loop draws with ``coupled``: given the noise its tokens are a function of the inner target, they have exactly
its distribution, and under an outer ``coupled`` they are the outer target's wherever the two models agree enough. For
an outer policy that judges probabilities, each block is drawn with noise of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from quasar.checks import start_drafting, start_verifying
from quasar.decode import speculate
from quasar.errors import InvalidRequestError
from quasar.policies.coupled import CoupledPolicy
from quasar.prefix import common_prefix_length
from quasar.processing import Processing
from quasar.protocols import Drafter, Need, Verifier
from quasar.sampling import Sampling
from quasar.stats import DecodeStats
from quasar.stopping import Stopping
from quasar.types import EMPTY_DRAFT, Draft, Step, Verification


class NestedDrafter:
    """Proposes what an inner drafter and an inner verifier decode.

    Args:
        drafter: Of the inner loop; another NestedDrafter makes a cascade of three levels.
        verifier: Of the inner loop, usually a quantized copy of the outer target.
        k: Tokens of the first block, at least 1.
        max_k: Blocks grow to this while they are confirmed whole, and shrink towards ``min_k`` while they are not.
        min_k: See ``max_k``.
        min_margin: End a block early after a token that the inner target preferred to the runner-up by less than this,
            in nats: there the outer target is likely to choose otherwise. 0: never. Not with ``with_probs``, where a
            token is judged by its probability and not by who came second.
        with_probs: Give the inner target's probabilities with each draft; the policies ``rejection`` and ``block`` need
            them.
    """

    needs: frozenset[Need] = frozenset()

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        *,
        k: int = 24,
        min_k: int = 8,
        max_k: int = 32,
        min_margin: float = 0.5,
        with_probs: bool = False,
    ) -> None:
        if not 1 <= min_k <= k <= max_k:
            raise InvalidRequestError(f"nested: k={k}, min_k={min_k}, max_k={max_k}; expected 1 ≤ min_k ≤ k ≤ max_k")
        self.drafter, self.verifier = drafter, verifier
        if not min_margin >= 0:
            raise InvalidRequestError(f"nested: min_margin={min_margin}; expected a number of at least 0")
        self.k, self.min_k, self.max_k = k, min_k, max_k
        self.min_margin = min_margin
        self.with_probs = with_probs

    def start(self, prompt_ids: Sequence[int], sampling: Sampling) -> NestedSession:
        return NestedSession(self, prompt_ids, sampling)


class NestedSession:
    """The inner sessions of one sequence, which may be ahead of what the outer target has confirmed."""

    def __init__(self, options: NestedDrafter, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._options = options
        self._sampling = sampling
        self._confirmed = list(prompt_ids)
        self._ahead: list[int] = []
        self._k = options.k
        self._drafting = start_drafting(options.drafter, prompt_ids, sampling)
        self._verifying = start_verifying(options.verifier, prompt_ids, options.drafter.needs)

    def propose(self, max_tokens: int) -> Draft:
        room = (self._options.verifier.max_length or float("inf")) - len(self._confirmed)
        k = int(min(self._k, max_tokens, room))
        if k < 1:
            return EMPTY_DRAFT
        probs = []
        for step in self._speculate(k):
            self._ahead += step.emission.token_ids
            if self._options.with_probs:
                judged = step.verification.logits[: len(step.emission.token_ids)]
                probs.append(self._sampling.probabilities(judged))
            elif self._is_unsure(step):
                break
        return Draft(self._ahead, torch.cat(probs) if probs else None)

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        if self._ahead:
            self._adapt(common_prefix_length(self._ahead, token_ids))
        self._confirmed += token_ids
        self._ahead = []
        self._follow()

    def restart(self, token_ids: Sequence[int]) -> None:
        self._confirmed, self._ahead = list(token_ids), []
        self._follow()

    def _speculate(self, k: int) -> Iterator[Step]:
        here = self._sampling.at(len(self._confirmed))
        return speculate(
            self._drafting,
            self._verifying,
            self._options.verifier,
            CoupledPolicy(),
            here.apart() if self._options.with_probs else here,
            Stopping(k),
            Processing(self._confirmed),
            DecodeStats(),
        )

    def _is_unsure(self, step: Step) -> bool:
        """Whether some choice of a step, whose tokens are the last of those ahead, was a narrow one."""
        if self._options.min_margin == 0:
            return False
        n = len(step.emission.token_ids)
        here = self._sampling.at(len(self._confirmed) + len(self._ahead) - n)
        margins = (here.margin(step.verification.logits[row], row) for row in range(n))
        return any(margin < self._options.min_margin for margin in margins)

    def _follow(self) -> None:
        """Bring the inner sessions to what is confirmed."""
        options, token_ids = self._options, self._confirmed
        if hasattr(self._drafting, "restart"):
            self._drafting.restart(token_ids)
        else:
            self._drafting = start_drafting(options.drafter, token_ids, self._sampling)
        if hasattr(self._verifying, "restart"):
            self._verifying.restart(token_ids)
        else:
            self._verifying = start_verifying(options.verifier, token_ids, options.drafter.needs)

    def _adapt(self, survived: int) -> None:
        """A block confirmed whole makes the next one longer; otherwise it moves towards what survived."""
        longer = self._k + self._k // 2 if survived == len(self._ahead) else (self._k + survived) // 2 + 1
        self._k = max(self._options.min_k, min(self._options.max_k, longer))
