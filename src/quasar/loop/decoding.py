"""One sequence in progress: what the loop asks, and what a scheduler of many sequences would ask in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import attrs

from quasar.loop.checks import (
    checked_draft,
    checked_verdict,
    checked_verification,
    faults_of,
    naming,
    prefill,
    restarted,
    start_drafting,
    start_verifying,
)
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.protocols import AcceptancePolicy, Drafter, DraftSession, Verifier, VerifySession
from quasar.types import Draft, FinishReason, Step, Verification

if TYPE_CHECKING:
    from typing_extensions import NotRequired, Unpack


class Parts(TypedDict):
    """What a sequence is decoded with, beside strategies that draft.

    Keys:
        verifier: Its target decodes.
        sampling: How a token is chosen, seen from any position.
        stopping: The one place where output ends.
        processing: The sequence's logits processors; left out: it has none.
        stats: Where counts and seconds go; left out: to new ones.
    """

    verifier: Verifier
    sampling: Sampling
    stopping: Stopping
    processing: NotRequired[Processing]
    stats: NotRequired[DecodeStats]


class PlainDecoding:
    """The target alone with one sequence: its session, and what belongs to the sequence.

    Nothing is computed before :meth:`prefill`.

    Args:
        prompt_ids: At least one token.
        parts: See :class:`Parts`.

    Attributes:
        finish_reason: Why the sequence ended; ``None`` while it goes on.
    """

    _needs: frozenset[str] = frozenset()

    def __init__(self, prompt_ids: Sequence[int], **parts: Unpack[Parts]) -> None:
        self.prompt_ids, self.verifier = prompt_ids, parts["verifier"]
        self.stats = parts.get("stats") or DecodeStats()
        self._verifying: VerifySession | None = None
        self._begin(prompt_ids, parts["sampling"], parts["stopping"], parts.get("processing"))

    def _begin(
        self, token_ids: Sequence[int], sampling: Sampling, stopping: Stopping, processing: Processing | None
    ) -> None:
        self.sampling, self.stopping = sampling.at(len(token_ids)), stopping
        self.processing = processing or Processing(token_ids)
        self.finish_reason: FinishReason | None = None

    @property
    def verifying(self) -> VerifySession:
        """The target's session, started when it is first asked for."""
        if self._verifying is None:
            self._verifying = start_verifying(self.verifier, self.prompt_ids, self._needs)
        return self._verifying

    def prefill(self, max_rows: int | None = None) -> int:
        """Compute the prompt, or about ``max_rows`` tokens of it; returns how many are still to be computed."""
        with self.stats.prefilling, faults_of(self.verifier, "prefill"):
            return prefill(self.verifying, max_rows)

    def verify(self, draft: Draft) -> Verification:
        """One forward of the target over a draft of k tokens: ``[k+1, V]`` logits, unprocessed."""
        with self.stats.verifying, faults_of(self.verifier, "verify"):
            return checked_verification(self.verifying.verify(draft), draft, self.verifier)

    def advance(self, token_ids: Sequence[int], verification: Verification) -> Step:
        """Take in the tokens of one step, up to where the sequence ends.

        Args:
            token_ids: All but the last are the head of the draft that was verified.
            verification: What they were chosen from.
        """
        emission = self.stopping.truncate(token_ids)
        with self.stats.verifying:
            self.verifying.commit(emission.token_ids)
        self.processing.commit(emission.token_ids)
        self.sampling = self.sampling.at(self.sampling.position + len(emission.token_ids))
        self.finish_reason = emission.finish_reason
        return Step(emission, verification)

    def close(self) -> None:
        """Free what the sequence has cached; nothing else may be called afterwards."""
        if self._verifying is not None and hasattr(self._verifying, "close"):
            self._verifying.close()
        self._verifying = None


class Decoding(PlainDecoding):
    """One sequence that is drafted and verified.

    Args:
        drafter: Proposes.
        policy: Decides.
        parts: See :class:`Parts`.
    """

    def __init__(
        self, prompt_ids: Sequence[int], *, drafter: Drafter, policy: AcceptancePolicy, **parts: Unpack[Parts]
    ) -> None:
        self.drafter, self.policy = drafter, policy
        self._drafting: DraftSession | None = None
        self._needs = drafter.needs
        super().__init__(prompt_ids, **parts)

    @property
    def drafting(self) -> DraftSession:
        """The drafter's session, started beside the target's when it is first asked for."""
        if self._drafting is None:
            sampling = attrs.evolve(self.sampling, wants_probs=self.policy.uses_draft_probs)
            self._drafting = start_drafting(self.drafter, self.prompt_ids, sampling, self.verifying)
        return self._drafting

    def restart(
        self,
        token_ids: Sequence[int],
        *,
        sampling: Sampling,
        stopping: Stopping,
        processing: Processing | None = None,
    ) -> None:
        """Become the decoding of other tokens; sessions that can restart keep what those begin with."""
        as_started = self.sampling.position == len(self.prompt_ids) and self.prompt_ids == token_ids
        self.prompt_ids = token_ids
        self._begin(token_ids, sampling, stopping, processing)
        if as_started:
            return
        if self._verifying is not None and not restarted(self._verifying, token_ids):
            self._verifying = self._drafting = None  # a draft session may know the target's
        if self._drafting is not None and not restarted(self._drafting, token_ids):
            self._drafting = None

    def close(self) -> None:
        """As of :class:`PlainDecoding`; the drafter's session goes as well."""
        super().close()
        self._drafting = None

    def prefill(self, max_rows: int | None = None) -> int:
        """As of :class:`PlainDecoding`; once nothing is left to compute, the drafter's session starts."""
        pending = super().prefill(max_rows)
        if pending == 0:
            with self.stats.prefilling:
                self.drafting  # noqa: B018
        return pending

    def propose(self) -> Draft:
        """What the drafter proposes, as far as the target can verify it and the budget lasts."""
        max_tokens = self.stopping.remaining - 1
        with self.stats.drafting, faults_of(self.drafter, "propose"):
            return checked_draft(self.drafting.propose(max_tokens), max_tokens, self.drafting, self.verifier)

    def settle(self, draft: Draft, raw: Verification) -> Step:
        """Decide how much of a draft is kept, and take it in.

        Args:
            draft: From :meth:`propose`.
            raw: What :meth:`verify` says of it.
        """
        verification = self.processing.apply(raw, draft)
        with naming(self.verifier, raw):
            with faults_of(self.policy, "decide"):
                judged = self.policy.decide(draft, verification, self.sampling)
            verdict = checked_verdict(judged, draft, verification, self.policy, self.verifier)
        step = self.advance(verdict.committed(draft), verification)
        with self.stats.drafting, faults_of(self.drafter, "commit"):
            self.drafting.commit(step.emission.token_ids, verification)
        self.stats.record(draft, verdict, step.emission)
        return step
