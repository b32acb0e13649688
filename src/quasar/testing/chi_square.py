"""A test of frequencies whose false alarms are rare enough to forget, and whose seeds are fixed anyway."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import TypeVar

from quasar.testing.running import ConformanceError

Outcome = TypeVar("Outcome", bound=Hashable)

_SIGMAS = 5.0
_RARE = 5.0


def check_frequencies(counts: Mapping[Outcome, int], probs: Mapping[Outcome, float], what: str) -> None:
    """Pearson's chi-square of ``counts`` against ``probs``; outcomes expected less than 5 times are taken together.

    The critical value is that of 5 standard deviations (Wilson and Hilferty's approximation): one false alarm in a
    few million checks.

    Raises:
        ConformanceError: An outcome of probability 0 occurred, or the frequencies are too far off.
    """
    n = sum(counts.values())
    for outcome, count in counts.items():
        if count and not probs.get(outcome, 0.0) > 0:
            raise ConformanceError(f"{what}: {outcome} occurred {count} times of {n} and has probability 0")
    common = {outcome: n * p for outcome, p in probs.items() if n * p >= _RARE}
    cells = [(counts.get(outcome, 0), expected) for outcome, expected in common.items()]
    rest = n - sum(expected for _, expected in cells)
    if rest >= _RARE:
        cells.append((n - sum(count for count, _ in cells), rest))
    if len(cells) < 2:
        return
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    if statistic > critical_value(len(cells) - 1):
        seen = {outcome: round(counts.get(outcome, 0) / n, 3) for outcome in list(common)[:8]}
        wanted = {outcome: round(expected / n, 3) for outcome, expected in list(common.items())[:8]}
        raise ConformanceError(f"{what}: frequencies {seen} of {n}, expected {wanted} (chi-square {statistic:.0f})")


def critical_value(degrees: int) -> float:
    """Of chi-square with that many degrees of freedom, at 5 standard deviations."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + _SIGMAS * math.sqrt(spread)) ** 3
