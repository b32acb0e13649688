"""Which tokens top-k, top-p and min-p leave, without sorting the vocabulary.

The cuts, their order and their rules for ties are those of transformers' logits warpers. What decides is the same
comparison of the same numbers, reached with fewer of them: only tokens near the top are sorted, and the mass of all
others is one sum. Where that sum is not precise enough to decide, or equals are parted, the warpers themselves do.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import torch

from quasar.loop.noise import Floats, Ids, just_below

_REACH = 8.0
"""Nats below the most probable token down to which top-p looks at tokens one by one; the rest is one sum in float32."""

_REST_ERROR = 3e-5
"""Relative error, at most, of that sum: of scores to 30 nats below, and of exp and of adding."""

_SUM_ERROR = 1e-11
"""Relative error, at most, of sums in float64, ours and the warpers'."""

_FEW, _BINS_PER_NAT, _MOST_BINS = 2048, 32, 4096
"""More weights than a few are sorted into bins first, and then only those of one bin."""

_FLOAT32_TEMPERATURES = (1e-6, 1e6)
"""Between these, float32 is good enough for the sum of the rest."""


@attrs.frozen
class Cuts:
    """What to keep of a row: the k most probable; of these the most probable that reach p; those of a least share."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def kept(self, row: Floats) -> Ids | None:
        """Ascending ids of what is kept of ``[V]`` logits whose largest is finite; ``None``: all of them.

        Ids of ``-inf`` may be among them.
        """
        ids: Ids | None = None
        try:
            if self.top_k is not None and self.top_k < len(row):
                ids = self._top_k(row, self.top_k)
            if self.top_p is not None and self.top_p < 1:
                ids = _within(ids, self._top_p(row if ids is None else row[ids], self.top_p))
            if self.min_p:
                ids = _within(ids, self._min_p(row if ids is None else row[ids], self.min_p))
        except _TooCloseError:
            return np.flatnonzero(np.isfinite(self.by_warpers(row)))
        return ids

    def weights(self, logits: Floats, peak: float) -> Floats:
        """``exp((logits - peak) / temperature)`` in float64."""
        return np.exp(self._scores(logits, peak, np.float64))

    def by_warpers(self, row: Floats) -> Floats:
        """``[V]`` scores in float64, cut by transformers' warpers: the definition of :meth:`kept`, and slow."""
        from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        with np.errstate(over="ignore"):
            scores = row.astype(np.float64) / self.temperature
        if not np.isfinite(scores.max()):  # a tiny temperature
            scores = self._scores(row, float(row.max()), np.float64)
        warpers: list[Any] = []
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(float(self.min_p)))
        cut: Floats = LogitsProcessorList(warpers)(None, torch.from_numpy(scores).unsqueeze(0))[0].numpy()  # type: ignore[arg-type]
        return cut

    def _top_k(self, row: Floats, k: int) -> Ids:
        least = np.partition(row, len(row) - k)[len(row) - k]
        if row.dtype != np.float64:
            return np.flatnonzero(row >= least)
        if not np.isfinite(least):
            return np.flatnonzero(row > least)
        # Division may make neighbours equal, and the warper compares what is divided.
        near = np.flatnonzero(row >= least - abs(least) * 1e-15)
        with np.errstate(over="ignore"):
            divided, bound = row[near] / self.temperature, least / self.temperature
        left: Ids = near[(divided if np.isfinite(bound) else row[near]) >= (bound if np.isfinite(bound) else least)]
        return left

    def _top_p(self, logits: Floats, p: float) -> Ids:
        peak = float(logits.max())
        head, rest = self._head_and_rest(logits, peak, _REACH)
        weights = self.weights(logits[head], peak)
        total = float(weights.sum()) + rest
        if total - rest < p * total:
            head, rest = np.flatnonzero(logits > -np.inf), 0.0
            weights = self.weights(logits[head], peak)
            total = float(weights.sum())
        before, near = _crossed_by(weights, p * total)
        falling = np.sort(near)[::-1]
        reached = before + np.cumsum(falling)
        last = min(int(np.searchsorted(reached, p * total)), len(falling) - 1)
        # The token before which p is not reached, and after which it is: rounding must not decide either.
        sums = (reached[last - 1] if last else before, reached[last])
        error = rest * _REST_ERROR + total * _SUM_ERROR
        if any(abs(sum_ - p * total) <= error for sum_ in sums):
            raise _TooCloseError
        kept = weights > falling[last]
        ties = np.flatnonzero(weights == falling[last])
        missing = int(np.count_nonzero(falling[: last + 1] == falling[last]))
        if missing < len(ties):  # which of equals go is up to torch's sort
            raise _TooCloseError
        kept[ties] = True
        left: Ids = head.take(np.flatnonzero(kept))
        return left

    def _head_and_rest(self, logits: Floats, peak: float, reach: float) -> tuple[Ids, float]:
        """Where the tokens stand that are at most ``reach`` nats below the best, and the weight of all others."""
        head = np.flatnonzero(logits >= just_below(peak - self.temperature * reach, logits))
        least, most = _FLOAT32_TEMPERATURES
        weights = np.exp(self._scores(logits, peak, np.float32 if least < self.temperature < most else np.float64))
        weights[head] = 0.0
        return head, float(weights.sum())

    def _min_p(self, logits: Floats, min_p: float) -> Ids:
        peak, lowest = float(logits.max()), math.log(min_p)
        near = np.flatnonzero(logits >= just_below(peak + self.temperature * (lowest - 1e-6), logits))
        scores = self._scores(logits[near], peak, np.float64)
        if np.any((np.abs(scores - lowest) < 1e-9) & (scores != 0)):
            raise _TooCloseError
        left: Ids = near[(scores > lowest) | (scores == 0)]
        return left

    def _scores(self, logits: Floats, peak: float, dtype: Any) -> Floats:
        """``(logits - peak) / temperature``, first subtracted, so that a tiny temperature divides nothing large."""
        scores: Floats
        with np.errstate(over="ignore", under="ignore"):
            if dtype is np.float32:
                scores = (logits - logits.dtype.type(peak)).astype(np.float32, copy=False)
                scores *= np.float32(1 / self.temperature)
            else:
                scores = (logits.astype(np.float64) - peak) / self.temperature
        return scores


def _crossed_by(weights: Floats, needed: float) -> tuple[float, Floats]:
    """Some of the weights, among which the falling sum of all reaches what is needed, and the sum of those above."""
    if len(weights) <= _FEW:
        return 0.0, weights
    with np.errstate(divide="ignore"):
        bins = np.minimum(np.log(weights) * -_BINS_PER_NAT, _MOST_BINS).astype(np.intp)
    reached = np.cumsum(np.bincount(bins, weights=weights))
    crossed = min(int(np.searchsorted(reached, needed)), len(reached) - 1)
    return float(reached[crossed - 1]) if crossed else 0.0, weights.take(np.flatnonzero(bins == crossed))


class _TooCloseError(Exception):
    """Rounding would decide, or the order in which a sort puts equals."""


def _within(ids: Ids | None, places: Ids) -> Ids:
    return places if ids is None else ids[places]
