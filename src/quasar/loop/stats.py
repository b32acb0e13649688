"""What a decode did and how long it took."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

import attrs

from quasar.types import Draft, Emission, Verdict


class Stopwatch:
    """Adds up the seconds spent inside ``with`` statements."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = perf_counter()

    @property
    def running(self) -> float:
        """Seconds up to now, the statement that has not ended included."""
        return self.seconds + perf_counter() - self._began

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.seconds += perf_counter() - self._began


@attrs.define(eq=False)
class DecodeStats:
    """Counts of one decode. Tokens cut off by a stop count nowhere but in ``drafted_tokens``."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    accept_lengths: list[int] = attrs.Factory(list)
    time_to_first_token: float = 0.0
    drafted_by_position: list[int] = attrs.Factory(list)
    accepted_by_position: list[int] = attrs.Factory(list)
    prefilling: Stopwatch = attrs.Factory(Stopwatch)
    drafting: Stopwatch = attrs.Factory(Stopwatch)
    verifying: Stopwatch = attrs.Factory(Stopwatch)
    total: Stopwatch = attrs.Factory(Stopwatch)

    def record(self, draft: Draft, verdict: Verdict, emission: Emission) -> None:
        """Count one step of the speculative loop."""
        accepted = min(verdict.n_accepted, len(emission.token_ids))
        self.drafted_tokens += len(draft)
        self.accepted_tokens += accepted
        while len(self.drafted_by_position) < len(draft):
            self.drafted_by_position.append(0)
            self.accepted_by_position.append(0)
        for position in range(len(draft)):
            self.drafted_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted
        self.record_plain(emission)

    def record_plain(self, emission: Emission) -> None:
        """Count one step that had no draft."""
        if self.steps == 0:
            self.time_to_first_token = self.total.running
        self.steps += 1
        self.emitted_tokens += len(emission.token_ids)
        self.accept_lengths.append(len(emission.token_ids))

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, JSON-serialisable.

        ``mean_acceptance_length`` is emitted tokens ÷ verify steps (1.0: no draft token was ever accepted);
        ``accept_lengths`` the emitted tokens of each step; ``acceptance_by_position[i]`` the share of drafts longer
        than i whose token i was emitted, ``accepted_by_position[i] / drafted_by_position[i]``, counts that can be
        added up over outputs; ``prefill_seconds`` the time before the first step, ``time_to_first_token`` until its
        end. ``tokens_per_second`` includes prefill.
        """
        by_position = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return {
            "steps": self.steps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "emitted_tokens": self.emitted_tokens,
            "mean_acceptance_length": self.emitted_tokens / self.steps if self.steps else 0.0,
            "accept_lengths": list(self.accept_lengths),
            "acceptance_by_position": [accepted / drafted for accepted, drafted in by_position],
            "accepted_by_position": list(self.accepted_by_position),
            "drafted_by_position": list(self.drafted_by_position),
            "time_to_first_token": self.time_to_first_token,
            "prefill_seconds": self.prefilling.seconds,
            "draft_seconds": self.drafting.seconds,
            "verify_seconds": self.verifying.seconds,
            "total_seconds": self.total.seconds,
            "tokens_per_second": self.emitted_tokens / self.total.seconds if self.total.seconds else 0.0,
        }
