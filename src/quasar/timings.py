"""Where the time of a program goes: stages are timed here where somebody asks for it (the command line does)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_seconds: ContextVar[dict[str, float] | None] = ContextVar("quasar_timings", default=None)


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Count what happens inside the ``with`` statement as part of a stage, without the stages inside it."""
    seconds = _seconds.get()
    if seconds is None:
        yield
        return
    before, started = sum(seconds.values()), time.perf_counter()
    try:
        yield
    finally:
        within = sum(seconds.values()) - before
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started - within


@contextmanager
def timings() -> Iterator[dict[str, float]]:
    """Inside the ``with`` statement, seconds are added up in the dictionary, by the names of the stages."""
    seconds: dict[str, float] = {}
    token = _seconds.set(seconds)
    try:
        yield seconds
    finally:
        _seconds.reset(token)
