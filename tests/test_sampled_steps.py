"""Many steps in a row keep the target's distribution: what one step reveals of its noise, the next does not use."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch

from quasar.drafters.nested import NestedDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.loop.sampling import Sampling
from quasar.pipeline.pipeline import Pipeline
from quasar.testing.running import examples
from quasar.types import Verification

TARGET, INNER = (0.5, 0.5), (0.9, 0.1)
LENGTH = 3
N = examples(1000).max_examples
CRITICAL = 35.0
"""Of chi-square with 7 degrees of freedom: a false alarm in 10**5 runs, and the seeds are fixed."""


class Coin:
    """A target that says the same whatever was said before."""

    max_length, invariance, approximations = None, "bitwise", ()

    def __init__(self, probs):
        self.row = torch.tensor(probs, dtype=torch.float64).log()
        self.vocab_size = len(probs)

    def start(self, prompt_ids, needs=frozenset()):
        return self

    def verify(self, draft):
        return Verification(self.row.repeat(len(draft) + 1, 1))

    def commit(self, token_ids):
        pass

    def restart(self, token_ids):
        pass


def chi_square(policy: str, inner=INNER, target=TARGET, vocab_size=None) -> float:
    """Of the first tokens over N seeds, in a cascade whose drafts are rejected at any place."""
    drafter = NestedDrafter(EmptyDrafter(), Coin(inner), k=3, min_k=3, max_k=3, vocab_size=vocab_size)
    pipe = Pipeline(Coin(target), drafter=drafter, policy=policy)
    settings = {"max_new_tokens": LENGTH + 3, "temperature": 1.0}
    counts = Counter(pipe.generate_ids([0], seed=seed, **settings).token_ids[:LENGTH] for seed in range(N))
    expected = {
        tokens: N * math.prod(target[token] for token in tokens)
        for tokens in itertools.product(range(len(target)), repeat=LENGTH)
    }
    return sum((counts[tokens] - n) ** 2 / n for tokens, n in expected.items())


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_the_tokens_of_several_steps_have_the_targets_joint_distribution(policy):
    """p = (.5, .5), q = (.9, .1), drafts of 3: most end in their middle, and the next begins among rejected tokens."""
    assert chi_square(policy) < CRITICAL


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_a_drafter_with_more_ids_than_the_target_keeps_the_distribution(policy):
    """It is told how many the target has, and gives the others no probability."""
    assert chi_square(policy, inner=(0.6, 0.1, 0.3), vocab_size=2) < CRITICAL


def test_the_frequencies_show_a_draft_that_was_cut_at_an_id_beyond():
    """Planted bug: that the draft was cut tells of what would have been rejected, and is taken for nothing."""
    assert chi_square("rejection", inner=(0.6, 0.1, 0.3)) > CRITICAL


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_a_drafter_with_fewer_ids_than_the_target_keeps_the_distribution(policy):
    """What it lacks it reads as another id and never drafts. Chi-square with 26 degrees of freedom: 1 in 10**5."""
    assert chi_square(policy, inner=(0.9, 0.1), target=(0.5, 0.3, 0.2), vocab_size=3) < 70


def test_the_frequencies_show_noise_that_is_used_twice(monkeypatch):
    """Planted bug: noise by absolute position alone, though block verification looked at what it did not reach."""
    monkeypatch.setattr(Sampling, "uniforms", lambda self, n: [self.uniform(row) for row in range(n)])
    monkeypatch.setattr(Sampling, "apart", lambda self: self)
    assert chi_square("block") > CRITICAL


def test_noise_of_a_draft_is_that_of_its_first_position():
    """The same draft, the same noise; one that begins elsewhere, or has another seed, shares none of it."""
    sampling = Sampling(temperature=1.0, seed=5, position=3)
    assert sampling.uniforms(4) == sampling.uniforms(4)
    assert sampling.uniforms(4)[:2] == sampling.uniforms(2)
    assert not set(sampling.uniforms(4)) & set(sampling.at(4).uniforms(4))
    assert sampling.apart() == sampling.apart()
    assert len({s.seed for s in (sampling, sampling.apart(), sampling.at(4).apart())}) == 3
    assert sampling.apart() != Sampling(temperature=1.0, seed=6, position=3).apart()
