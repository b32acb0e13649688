"""Long work reports its progress here; nothing is shown unless somebody installs a tracker (the command line does)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Item = TypeVar("Item")
Tracker = Callable[[Sequence[Any], str], Iterator[Any]]

_tracker: ContextVar[Tracker | None] = ContextVar("quasar_progress", default=None)


def track(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Iterate over ``items``, shown as a bar named ``description`` where a tracker is installed."""
    tracker = _tracker.get()
    return iter(items) if tracker is None else tracker(items, description)


@contextmanager
def tracked_by(tracker: Tracker) -> Iterator[None]:
    """Show progress through ``tracker`` inside the ``with`` statement."""
    token = _tracker.set(tracker)
    try:
        yield
    finally:
        _tracker.reset(token)
