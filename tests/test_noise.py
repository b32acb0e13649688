"""The race that draws a token: the noise has its distribution, and looking at few tokens finds the winner of all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quasar.loop.noise import Noise, best_of_race
from quasar.testing.chi_square import check_frequencies


@given(
    seed=st.integers(0, 2**64 - 1),
    size=st.integers(1, 6000),
    spread=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    temperature=st.sampled_from([1e-300, 0.1, 0.7, 1.0, 5.0, 1e9]),
    n=st.integers(1, 3),
    share=st.sampled_from([None, 0.1, 0.9]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_the_race_is_won_by_the_best_of_all(seed, size, spread, temperature, n, share, dtype):
    """Against scores of every token; of all tokens and of some, with ``-inf`` among them."""
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal(size) * spread).astype(dtype)
    logits[generator.random(size) < 0.1] = -np.inf
    logits[generator.integers(size)] = spread
    noise = Noise((seed, 7), size)
    ids = None if share is None else np.flatnonzero(generator.random(size) < share)
    if ids is not None and (len(ids) == 0 or logits[ids].max() == -np.inf):
        return
    everybody = np.arange(size) if ids is None else ids
    with np.errstate(over="ignore"):
        scores = (logits[everybody].astype(np.float64) - float(logits[everybody].max())) / temperature
    scores -= np.log(noise.of(everybody))
    found, values = best_of_race(logits[everybody], temperature, noise, ids, n)
    expected = np.sort(scores)[::-1][:n]
    assert values.tolist() == expected.tolist()
    finite = np.isfinite(values)
    assert found[finite].tolist() == everybody[np.argsort(-scores, kind="stable")[:n]][finite].tolist()


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 3000), st.integers(1, 3000))
def test_the_noise_of_a_token_does_not_depend_on_the_vocabulary(seed, position, small, more):
    """A drafter with fewer tokens shares that of those it has; another key has other noise."""
    one, other = Noise((seed, position), small), Noise((seed, position), small + more)
    ids = np.arange(small)
    assert one.of(ids).tolist() == other.of(ids).tolist()
    assert one.of(ids[-1:]).tolist() == one.of(ids)[-1:].tolist()
    assert not set(one.of(ids)) & set(Noise((seed, position + 1), small).of(ids))


def test_the_noise_is_exponential_on_both_sides_of_the_bound():
    """Frequencies of many bins, narrow ones below the bound; and neighbours in id and in position are independent."""
    times = np.concatenate([Noise((5, position), 50_000).of(np.arange(50_000)) for position in range(20)])
    edges = -np.log1p(
        -np.array([0, 1 / 512, 1 / 256, 3 / 512, 1 / 128, 3 / 256, 1 / 32, 0.1, 0.3, 0.5, 0.8, 0.95, 1 - 1e-12])
    )
    counts = np.histogram(times, edges)[0]
    probs = np.diff(-np.expm1(-edges))
    check_frequencies(dict(enumerate(counts.tolist())), dict(enumerate((probs / probs.sum()).tolist())), "exponential")
    high = (times > np.log(2)).reshape(20, -1)
    for pairs in (high[:, 1:] * 2 + high[:, :-1], high[1:] * 2 + high[:-1]):
        counts = np.bincount(pairs.ravel(), minlength=4)
        check_frequencies(dict(enumerate(counts.tolist())), dict.fromkeys(range(4), 0.25), "neighbours")


@pytest.mark.parametrize("size", [4, 700])
def test_tokens_are_drawn_with_their_probabilities(size):
    """Whole races at many positions, with few candidates and with many."""
    probs = np.arange(1, size + 1) ** 2.0
    probs /= probs.sum()
    logits = np.log(probs) * 0.7
    draws = [int(best_of_race(logits, 0.7, Noise((3, position), size))[0][0]) for position in range(20_000)]
    counts = np.bincount(np.array(draws) * 4 // size, minlength=4)
    grouped = {i: float(probs[np.arange(size) * 4 // size == i].sum()) for i in range(4)}
    check_frequencies(dict(enumerate(counts.tolist())), grouped, "tokens drawn")
