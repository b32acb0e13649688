"""What the checks are built from: properties that run at once, and one kind of failure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

_TIMES = {"quick": 1, "thorough": 10}
"""How many times the examples that a property asks for each profile draws."""


class ConformanceError(AssertionError):
    """A strategy does not keep what its protocol says; the message names the rule and what was seen."""


def require(condition: bool, message: str) -> None:
    """Raise :class:`ConformanceError` unless ``condition`` holds."""
    if not condition:
        raise ConformanceError(message)


def load_profile(name: str) -> None:
    """Load the hypothesis profile ``quick``, or ``thorough``, which draws ten times as many examples.

    Both draw the same examples in every run and know no limit of time: a busy machine is no fault of the code.
    """
    for profile, times in _TIMES.items():
        settings.register_profile(
            profile,
            max_examples=60 * times,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )
    settings.load_profile(name)


def examples(n: int) -> settings:
    """Decorator of a property: it is tried on ``n`` examples, in the profile ``thorough`` on ten times as many."""
    return settings(max_examples=n * _TIMES.get(settings.get_current_profile_name(), 1))


def run_settings(n: int) -> settings:
    """The same ``n`` examples in every run (:func:`examples`), without limit of time, with one failure reported."""
    return settings(
        examples(n),
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


def for_all(n: int, *strategies: SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Decorator: run a property over ``n`` draws now, and raise the smallest failure.

    A failure that does not occur again with the same draw is a :class:`ConformanceError` too: something is remembered.
    """

    def run(check: Callable[..., None]) -> None:
        try:
            run_settings(n)(given(*strategies)(check))()
        except Flaky as error:
            raise ConformanceError(
                f"{check.__name__.replace('_', ' ')}: not when it is tried again in the same way, so something of an "
                "earlier sequence is remembered. A drafter that means to declares remembers = True"
            ) from error

    return run


@contextmanager
def global_random_state_kept(who: str) -> Iterator[None]:
    """Whatever happens inside must neither draw from nor seed the random state that a whole process shares."""
    before = _random_state()
    yield
    require(
        before == _random_state(),
        f"{who} drew from, or seeded, the global random state of torch, numpy or random, which belongs to the user",
    )


@contextmanager
def other_defaults() -> Iterator[None]:
    """Inside, a tensor that is made without a dtype is in float64, and one without a device has no values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


def _random_state() -> tuple[Any, ...]:
    numpy_state = tuple(np.asarray(part).tobytes() for part in np.random.get_state())
    return random.getstate(), numpy_state, torch.get_rng_state().numpy().tobytes()
