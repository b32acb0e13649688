"""How much of a sequence two token lists share."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of leading tokens that are the same in both."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))
