"""Exponential noise for each token at one position, and the race that draws a token with it.

With E_x independent exponential variables, ``argmin E_x / p_x`` has exactly the distribution p (the Gumbel-max trick in
its exponential form). Only tokens that can win are looked at: those that start early, whose E_x is below a bound that
one in 128 comes under, and those probable enough to win although they start late. An exponential variable above a bound
is the bound and another exponential variable, so early tokens are found by geometric gaps between their ids, without
any number for the others; what a token's E_x is beyond that comes from its id alone, when it is asked for.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.intp]
Floats = NDArray[Any]
"""Logits, probabilities, scores; float32 or float64."""

_SHARE = 1 / 128
"""Of tokens that start early."""

_BOUND = -math.log1p(-_SHARE)
"""E_x of early tokens lies below, of others above; the chance to be below is the share."""

_FEW = 512
"""So many candidates are all looked at."""

_GAMMA, _MIX_1, _MIX_2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SHIFTS = tuple(np.uint64(number) for number in (30, 27, 31, 11))


class Noise:
    """E_x of the tokens 0 … n-1; a larger n gives the same to the tokens that both have.

    Args:
        key: Two numbers below 2**64; other keys are other, independent noise (Philox, Salmon et al. 2011).
        n: Tokens there are.
    """

    def __init__(self, key: tuple[int, int], n: int) -> None:
        bits = np.random.Philox(key=key[0] | key[1] << 64)
        self._start = bits.random_raw()
        self.early = _early_ids(bits, n)

    def of(self, token_ids: Ids) -> Floats:
        """E_x of some tokens, float64."""
        times = self.if_late(token_ids)
        early = self.are_early(token_ids)
        times[early] = self.if_early(token_ids[early])
        return times

    def are_early(self, token_ids: Ids) -> Floats:
        """Which of some tokens start early."""
        if not len(self.early):
            return np.zeros(len(token_ids), dtype=bool)
        places = self.early.searchsorted(token_ids)
        early: Floats = self.early.take(places, mode="clip") == token_ids
        return early

    def if_early(self, token_ids: Ids) -> Floats:
        """E_x of tokens of which it is known that they start early."""
        times: Floats = -np.log1p(_uniform(_split_mix(self._start, token_ids)) * -_SHARE)
        return times

    def if_late(self, token_ids: Ids) -> Floats:
        """E_x of tokens of which it is known that they do not."""
        times: Floats = _BOUND - np.log(_uniform(_split_mix(self._start, token_ids)))
        return times


def best_of_race(
    logits: Floats, temperature: float, noise: Noise, token_ids: Ids | None = None, n: int = 1
) -> tuple[Ids, Floats]:
    """The n tokens that come first in the race, best first, and their scores.

    Args:
        logits: ``[V]``, or those of ``token_ids`` alone; the largest is finite.
        temperature: Divides them; above 0, however little.
        noise: Noise of the position.
        token_ids: Ascending ids of the tokens that take part; ``None``: all.
        n: Fewer are returned if fewer take part.

    Returns:
        Ids and float64 scores: log-probabilities, up to a constant of the row, plus Gumbel noise.
    """
    best = int(logits.argmax())
    peak = float(logits[best])

    def scores(places: Ids, times: Floats) -> Floats:
        with np.errstate(over="ignore"):  # a tiny temperature sends the others to -inf
            found: Floats = (logits[places].astype(np.float64) - peak) / temperature - np.log(times)
        return found

    def ids_at(places: Ids) -> Ids:
        return places if token_ids is None else token_ids[places]

    if len(logits) <= _FEW:
        places = np.arange(len(logits))
        found = scores(places, noise.of(ids_at(places)))
    else:
        places = noise.early if token_ids is None else _places_of(noise.early, token_ids)
        found = scores(places, noise.if_early(ids_at(places)))
        to_beat = float(np.partition(found, -n)[-n]) if len(found) >= n else -math.inf
        if n == 1:
            to_beat = max(to_beat, float(-np.log(noise.of(ids_at(np.array([best]))))[0]))
        # A token that does not start early has a score of at most (logit - peak) / temperature - log(_BOUND).
        threshold = peak + temperature * (to_beat + math.log(_BOUND) - 1e-6)
        late = np.flatnonzero(logits >= just_below(threshold, logits))
        late = late[~noise.are_early(ids_at(late))]
        places = np.concatenate((places, late))
        found = np.concatenate((found, scores(late, noise.if_late(ids_at(late)))))
    order = found.argsort()[: -n - 1 : -1] if n > 1 else np.array([found.argmax()])
    return ids_at(places[order]), found[order]


def _places_of(some: Ids, token_ids: Ids) -> Ids:
    """Where those of ``some`` stand that are among ``token_ids``; both ascending."""
    places = token_ids.searchsorted(some)
    found: Ids = places[token_ids.take(places, mode="clip") == some]
    return found


def _early_ids(bits: np.random.Philox, n: int) -> Ids:
    """The ids of tokens that start early, ascending: each does with the same chance, whatever the others do."""
    n_gaps = int(n * _SHARE + 4 * math.sqrt(n * _SHARE)) + 4
    ids = _next_early(bits, -1, n_gaps)
    while ids[-1] < n:
        ids = np.concatenate((ids, _next_early(bits, int(ids[-1]), n_gaps)))
    return ids[: ids.searchsorted(n)]


def _next_early(bits: np.random.Philox, after: int, n: int) -> Ids:
    """The n early ids that follow one: gaps have a geometric distribution."""
    gaps = np.log(_uniform(bits.random_raw(n)))
    gaps *= 1 / math.log1p(-_SHARE)
    ids = gaps.astype(np.intp)
    ids += 1
    np.cumsum(ids, out=ids)
    ids += after
    return ids


def just_below(threshold: float, logits: Floats) -> Any:
    """A threshold that rounding, its own and that to the dtype of the logits, lifts above no logit that reaches it."""
    with np.errstate(over="ignore"):
        return np.nextafter(logits.dtype.type(np.nextafter(threshold, -np.inf)), logits.dtype.type(-np.inf))


def _split_mix(start: int, token_ids: Ids) -> NDArray[np.uint64]:
    """Numbers of the generator SplitMix64 (Steele, Lea, Flood 2014) by their index."""
    bits = token_ids.astype(np.uint64)
    bits *= _GAMMA
    bits += np.uint64(start)
    bits ^= bits >> _SHIFTS[0]
    bits *= _MIX_1
    bits ^= bits >> _SHIFTS[1]
    bits *= _MIX_2
    bits ^= bits >> _SHIFTS[2]
    return bits


def _uniform(bits: NDArray[np.uint64]) -> Floats:
    """Numbers in (0, 1), float64."""
    numbers = (bits >> _SHIFTS[3]).astype(np.float64)
    numbers += 0.5
    numbers *= 2.0**-53
    return numbers
