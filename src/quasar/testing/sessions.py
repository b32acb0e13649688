"""A state machine over sessions: started, proposed to, verified, committed, abandoned, restarted, in any order.

After every step a verify session must say of every position what plain decoding of the same tokens says, and have
cached all committed tokens but the last.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from quasar.drafters.none import EmptyDrafter
from quasar.loop.checks import (
    check_every_row,
    checked_draft,
    checked_verification,
    prefill,
    start_drafting,
    start_verifying,
)
from quasar.loop.sampling import Sampling
from quasar.protocols import Drafter, Invariance, Verifier, VerifySession
from quasar.testing.running import require
from quasar.types import EMPTY_DRAFT, Draft, Verification

_MAX_LENGTH = 48
_MAX_SEQUENCES = 3

_ROUNDING: dict[Invariance, float] = {"bitwise": 0.0, "argmax": 1e-3, "none": 0.3}
"""How far a logit may be from that of plain decoding, in units of the row's standard deviation."""

_PREFILL = 0.3
"""The same where the tokens were a prompt: one wide forward, which quantized activations round a little otherwise."""


class PlainDecoding:
    """What a verifier says when it decodes one token a step; remembered, for it is asked for often."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._rows: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._last: tuple[tuple[int, ...], tuple[int, ...], VerifySession] | None = None

    def row(self, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> Tensor:
        """``[V]`` logits after ``token_ids``, committed one by one to a session of ``prompt``."""
        if (prompt, token_ids) not in self._rows:
            self._decode(prompt, token_ids)
        return self._rows[prompt, token_ids]

    def _decode(self, prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        """With the session that decoded last, if what it said is the beginning of this."""
        if self._last is not None and self._last[0] == prompt and token_ids[: len(self._last[1])] == self._last[1]:
            _, said, session = self._last
        else:
            said, session = (), start_verifying(self._verifier, list(prompt), frozenset())
            self._rows[prompt, ()] = session.verify(EMPTY_DRAFT).logits[0].clone()
        for n in range(len(said), len(token_ids)):
            session.commit([token_ids[n]])
            self._rows[prompt, token_ids[: n + 1]] = session.verify(EMPTY_DRAFT).logits[0].clone()
        self._last = prompt, token_ids, session


def check_row(verifier: Verifier, row: Tensor, expected: Tensor, what: str, *, tolerance: float | None = None) -> None:
    """Compare ``[V]`` logits as strictly as the verifier declares, or up to ``tolerance`` standard deviations.

    Raises:
        ConformanceError: They differ by more, or by rounding and choose another token where it is no near-tie.
    """
    if torch.equal(row, expected):
        return
    finite = torch.isfinite(expected)
    scale = float(expected[finite].double().std(correction=0)) or 1.0
    difference = float((row[finite].double() - expected[finite].double()).abs().max()) / scale
    allowed = _ROUNDING[verifier.invariance] if tolerance is None else tolerance
    require(
        torch.equal(finite, torch.isfinite(row)) and difference <= allowed,
        f"{type(verifier).__name__} declares invariance {verifier.invariance!r}, but {what} its logits differ by "
        f"{difference:.2g} standard deviations",
    )


class Sequence:
    """One sequence: its sessions, and what is committed."""

    def __init__(self, verifier: Verifier, drafter: Drafter, prompt: tuple[int, ...]) -> None:
        given = list(prompt)
        self.session: VerifySession = start_verifying(verifier, given, drafter.needs)
        prefill(self.session)
        self.drafting = start_drafting(drafter, given, Sampling(), self.session)
        require(given == list(prompt), f"{type(verifier).__name__} changed the prompt that it was started with")
        self.proposed = False
        self.prompt, self.token_ids = prompt, tuple[int, ...]()
        self.draft: Draft | None = None
        self.shown: tuple[Verification, Tensor] | None = None
        self.tolerance: float | None = None
        """Set once it was restarted: what it has cached was computed in other pieces than a prompt is."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.token_ids)


class SessionMachine(RuleBasedStateMachine):
    """Several sessions of :attr:`verifier` and :attr:`drafter`; :attr:`seen` counts what happened in all runs.

    Made by :func:`session_machine`.
    """

    verifier: Verifier
    drafter: Drafter
    seen: Counter[str]
    sequences: Bundle[Sequence] = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.plain = PlainDecoding(self.verifier)
        self.alive: list[Sequence] = []
        self.last: Sequence | None = None

    def _note(self, event: str, sequence: Sequence) -> None:
        self.seen[event] += 1
        self.seen["interleaved"] += self.last is not None and self.last is not sequence
        self.last = sequence

    def _token(self, token_id: int) -> int:
        return token_id % self.verifier.vocab_size

    def _tokens(self, token_ids: list[int]) -> tuple[int, ...]:
        return tuple(map(self._token, token_ids))

    @precondition(lambda self: len(self.alive) < _MAX_SEQUENCES)
    @rule(target=sequences, prompt=st.lists(st.integers(0, 2**16), min_size=1, max_size=12))
    def start(self, prompt: list[int]) -> Sequence:
        self.alive.append(Sequence(self.verifier, self.drafter, self._tokens(prompt)))
        return self.alive[-1]

    @rule(sequence=sequences, n_right=st.integers(0, 5), junk=st.lists(st.integers(0, 2**16), max_size=4))
    def verify(self, sequence: Sequence, n_right: int, junk: list[int]) -> None:
        """Score a draft that begins as the target would; what was scored before and not committed is abandoned."""
        right = list[int]()
        for _ in range(n_right):
            row = self.plain.row(sequence.prompt, (*sequence.token_ids, *right))
            right.append(int(row.argmax()))
        self._verify(sequence, Draft((*right, *self._tokens(junk)[: max(0, 6 - n_right)])))

    @rule(sequence=sequences, max_tokens=st.integers(0, 8), n_kept=st.integers(0, 8), next_token=st.integers(0, 2**16))
    def propose(self, sequence: Sequence, max_tokens: int, n_kept: int, next_token: int) -> None:
        """A whole step of a loop with the drafter, of any outcome; where there is no room for it, nothing."""
        max_tokens = min(max_tokens, self._room(sequence))
        if max_tokens < 0:
            return
        proposed = sequence.drafting.propose(max_tokens)
        sequence.proposed = True
        self._verify(sequence, checked_draft(proposed, max_tokens, sequence.drafting, self.verifier))
        self.seen["proposed"] += bool(sequence.draft)
        self.commit(sequence, n_kept, next_token)

    def _room(self, sequence: Sequence) -> int:
        """Draft tokens that fit behind what is committed, beside the one that follows them."""
        return min(_MAX_LENGTH, self.verifier.max_length or _MAX_LENGTH) - sequence.length - 1

    def _verify(self, sequence: Sequence, draft: Draft) -> None:
        if self._room(sequence) < 0:
            return
        draft = draft.clipped(self._room(sequence), self.verifier.vocab_size)
        self._note("verified" if sequence.draft is None else "abandoned", sequence)
        self.plain.row(sequence.prompt, (*sequence.token_ids, *draft.token_ids))  # remembers all that follow
        verification = checked_verification(sequence.session.verify(draft), draft, self.verifier)
        check_every_row(verification, self.verifier)
        for i, row in enumerate(verification.logits):
            expected = self.plain.row(sequence.prompt, (*sequence.token_ids, *draft.token_ids[:i]))
            what = f"at position {i} of {len(draft) + 1}"
            check_row(self.verifier, row, expected, what, tolerance=sequence.tolerance)
        sequence.draft, sequence.shown = draft, (verification, verification.logits.clone())

    @rule(sequence=sequences, n_right=st.integers(0, 5), wrong=st.none() | st.integers(0, 2**16))
    def step(self, sequence: Sequence, n_right: int, wrong: int | None) -> None:
        """What a greedy loop does with a draft that is right, or right but for its last token."""
        self.verify(sequence, n_right, [] if wrong is None else [wrong])
        kept = () if sequence.draft is None else sequence.draft.token_ids[:n_right]
        own = self.plain.row(sequence.prompt, (*sequence.token_ids, *kept))
        self.commit(sequence, n_right, int(own.argmax()))

    @precondition(lambda self: any(sequence.draft is not None for sequence in self.alive))
    @rule(sequence=sequences, n_kept=st.integers(0, 9), next_token=st.integers(0, 2**16))
    def commit(self, sequence: Sequence, n_kept: int, next_token: int) -> None:
        """Keep a part of the draft that was scored last, and roll back the rest."""
        if sequence.draft is None or sequence.shown is None:
            return
        kept = sequence.draft.token_ids[: min(n_kept, len(sequence.draft))]
        committed = (*kept, self._token(next_token))
        self._note("committed", sequence)
        self.seen["rolled back"] += len(kept) < len(sequence.draft)
        self.seen["kept several"] += len(kept) > 1
        if not sequence.proposed:
            sequence.drafting.propose(0)  # a loop asks before it commits
        sequence.session.commit(committed)
        sequence.drafting.commit(committed, sequence.shown[0])
        sequence.token_ids += committed
        sequence.draft, sequence.proposed = None, False

    @rule(sequence=sequences, n_kept=st.integers(0, 30), tail=st.lists(st.integers(0, 2**16), max_size=6))
    def restart(self, sequence: Sequence, n_kept: int, tail: list[int]) -> None:
        """Where a session can, make it that of other tokens, which begin as its own do."""
        restart: Any = getattr(sequence.session, "restart", None)
        own = (*sequence.prompt, *sequence.token_ids)
        new = (*own[:n_kept], *self._tokens(tail))[: _MAX_LENGTH - 8] or own[:1]
        if restart is None:
            return
        self._note("restarted", sequence)
        restart(list(new))
        sequence.drafting = start_drafting(self.drafter, list(new), Sampling(), sequence.session)
        sequence.prompt, sequence.token_ids = new, ()
        sequence.draft, sequence.shown, sequence.proposed = None, None, False
        sequence.tolerance = _PREFILL
        self._verify(sequence, EMPTY_DRAFT)

    @rule(sequence=sequences)
    def look_from_scratch(self, sequence: Sequence) -> None:
        """A new session, given everything as a prompt, says the same of the next token."""
        fresh = start_verifying(self.verifier, [*sequence.prompt, *sequence.token_ids], frozenset())
        row, expected = fresh.verify(EMPTY_DRAFT).logits[0], self.plain.row(sequence.prompt, sequence.token_ids)
        check_row(self.verifier, row, expected, "given the same tokens as a prompt", tolerance=_PREFILL)

    @invariant()
    def cached_all_but_the_last(self) -> None:
        for sequence in self.alive:
            cached = getattr(sequence.session, "cached_length", None)
            if cached is not None and sequence.draft is None:
                require(
                    cached == sequence.length - 1,
                    f"{type(sequence.session).__name__} has cached {cached} positions of {sequence.length} committed "
                    "tokens, expected all but the last",
                )

    @invariant()
    def logits_are_the_callers_to_keep(self) -> None:
        for sequence in self.alive:
            if sequence.shown is not None:
                verification, kept = sequence.shown
                require(
                    torch.equal(verification.logits, kept),
                    f"{type(self.verifier).__name__}: logits that were returned earlier have changed since",
                )


def session_machine(verifier: Verifier, drafter: Drafter | None = None) -> type[SessionMachine]:
    """The state machine for one verifier, and a drafter (``None``: one that proposes nothing).

    Run it with ``hypothesis.stateful.run_state_machine_as_test``.
    """
    attributes = {"verifier": verifier, "drafter": drafter or EmptyDrafter(), "seen": Counter()}
    return type("SessionMachine", (SessionMachine,), attributes)
