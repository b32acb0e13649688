"""No drafting: the do-nothing twin of a drafter. With it the loop decodes one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from quasar.loop.sampling import Sampling
from quasar.protocols import VerifySession
from quasar.types import EMPTY_DRAFT, Draft, Verification


class EmptyDrafter:
    """Never proposes anything. Stateless, so it is its own session."""

    needs: frozenset[str] = frozenset()

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> EmptyDrafter:
        return self

    def propose(self, max_tokens: int) -> Draft:
        return EMPTY_DRAFT

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        pass

    def restart(self, token_ids: Sequence[int]) -> None:
        pass
