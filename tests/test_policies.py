"""Sampling is exact: proven by enumeration through the policies' own functions, and by equality for coupled."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import find, given
from hypothesis import strategies as st

from quasar.drafters.function import FunctionDrafter
from quasar.errors import InvalidRequestError, PluginError
from quasar.loop.sampling import Sampling
from quasar.loop.stopping import Stopping
from quasar.policies import block, rejection
from quasar.policies.block import BlockPolicy
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.greedy import GreedyPolicy
from quasar.policies.margin import MarginPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.testing.fakes import TableLM
from quasar.testing.running import examples
from quasar.types import EMPTY_DRAFT, Draft, Verdict, Verification
from test_decode import run, tokens_of

V = 3


@st.composite
def distributions(draw: st.DrawFn, size: int = V) -> torch.Tensor:
    """``[size]`` float64 with zeros, ties and one-hot rows among them; e.g. (0, 1/3, 2/3)."""
    weights = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(any))
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


class Tree:
    """A distribution over the next token for every context of new tokens, drawn as it is asked for."""

    def __init__(self, draw, size: int = V) -> None:
        self._draw, self._rows, self._size = draw, {}, size

    def __call__(self, context: tuple[int, ...]) -> torch.Tensor:
        if context not in self._rows:
            self._rows[context] = self._draw(distributions(self._size))
        return self._rows[context]


def logits_of(probs: torch.Tensor) -> torch.Tensor:
    return probs.log()


def emitted_by_rejection(target, drafter, k: int, residual=rejection.residual) -> Counter:
    """The exact distribution of what one step emits, over all drafts and all outcomes of the policy's own functions."""
    emitted: Counter = Counter()
    for draft in itertools.product(range(V), repeat=k):
        weight = math.prod(float(drafter(draft[:i])[token]) for i, token in enumerate(draft))
        for i, token in enumerate(draft if weight else ()):
            target_probs, draft_probs = target(draft[:i]).numpy(), drafter(draft[:i]).numpy()
            accepted = rejection.acceptance_probability(target_probs, draft_probs, token)
            if accepted < 1:
                for x, p in enumerate(residual(target_probs, draft_probs).tolist()):
                    emitted[(*draft[:i], x)] += weight * (1 - accepted) * p
            weight *= accepted
        if weight:
            for x, p in enumerate(target(draft).tolist()):
                emitted[(*draft, x)] += weight * p
    return emitted


def emitted_by_block(target, drafter, k: int) -> Counter:
    emitted: Counter = Counter()
    for tokens in itertools.product(range(V), repeat=k):
        weight = math.prod(float(drafter(tokens[:i])[token]) for i, token in enumerate(tokens))
        if not weight:
            continue
        target_probs = [target(tokens[:i]).numpy() for i in range(k + 1)]
        draft_probs = [drafter(tokens[:i]).numpy() for i in range(k)]
        keep = [1.0]
        for i, token in enumerate(tokens):
            keep.append(block.next_weight(keep[i], token, target_probs[i], draft_probs[i]))
        chances = block.keep_probabilities(keep, target_probs, draft_probs)
        for n in range(k, -1, -1):
            # n is the longest prefix whose own number is below its chance; the numbers are independent.
            kept = weight * math.prod(1 - chance for chance in chances[n:]) * (chances[n - 1] if n else 1.0)
            rest = target_probs[k] if n == k else block.block_residual(keep[n], target_probs[n], draft_probs[n])
            for x, p in enumerate(rest.tolist()):
                emitted[(*tokens[:n], x)] += kept * p
    return emitted


def completed(emitted: Counter, target, length: int) -> Counter:
    """What follows if the target alone goes on from what was emitted, up to ``length`` tokens."""
    full: Counter = Counter()
    for tokens, weight in emitted.items():
        rest = length - len(tokens)
        for tail in itertools.product(range(V), repeat=max(rest, 0)):
            sequence = (*tokens, *tail)[:length]
            p = math.prod(float(target(sequence[:i])[sequence[i]]) for i in range(len(tokens), length))
            full[sequence] += weight * p
    return full


def expected(target, length: int) -> dict[tuple[int, ...], float]:
    sequences = itertools.product(range(V), repeat=length)
    return {s: math.prod(float(target(s[:i])[token]) for i, token in enumerate(s)) for s in sequences}


def error_of(emitted: Counter, target, k: int) -> float:
    full = completed(emitted, target, k + 1)
    return max(abs(full[s] - p) for s, p in expected(target, k + 1).items())


@pytest.mark.parametrize("emitted_by", [emitted_by_rejection, emitted_by_block])
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_emitted_has_exactly_the_targets_distribution(emitted_by, k, deterministic):
    """For every draft outcome, added up: the target's joint distribution to 1e-12, and rejections do occur."""
    seen = Counter()

    @examples(40)
    @given(st.data())
    def check(data):
        target, drafter = Tree(data.draw), Tree(data.draw)
        if deterministic:
            choices = {}
            drafter = lambda context: torch.eye(V, dtype=torch.float64)[  # noqa: E731
                choices.setdefault(context, data.draw(st.integers(0, V - 1)))
            ]
        emitted = emitted_by(target, drafter, k)
        assert abs(sum(emitted.values()) - 1) < 1e-12
        assert error_of(emitted, target, k) < 1e-12
        seen["rejected at once"] += any(len(s) == 1 and p > 0 for s, p in emitted.items())
        seen["kept whole"] += any(len(s) == k + 1 and p > 0 for s, p in emitted.items())

    check()
    assert min(seen["rejected at once"], seen["kept whole"]) >= 5, seen


def test_block_verification_keeps_no_fewer_tokens_than_rejection():
    """Expected accepted tokens: block ≥ token by token, more for some pair, equal for deterministic drafts."""
    gained = 0

    @examples(60)
    @given(st.data())
    def check(data):
        nonlocal gained
        target, drafter = Tree(data.draw), Tree(data.draw)
        lengths = [
            sum(p * (len(s) - 1) for s, p in by(target, drafter, 2).items())
            for by in (emitted_by_rejection, emitted_by_block)
        ]
        assert lengths[1] >= lengths[0] - 1e-12
        gained += lengths[1] > lengths[0] + 1e-6

    check()
    assert gained >= 5


@pytest.mark.parametrize(
    "bug",
    [
        lambda target, drafter: emitted_by_rejection(target, drafter, 1, residual=lambda p, q: p),
        lambda target, drafter: emitted_by_rejection(target, lambda c: drafter(c).softmax(0), 1, lambda p, q: p),
    ],
    ids=["residual replaced by the target", "the residual of other probabilities"],
)
def test_the_enumeration_finds_a_wrong_residual(bug):
    """Planted bugs: some pair of distributions shows them."""

    def shows(pair):
        target, drafter = (lambda context, row=row: row for row in pair)
        return error_of(bug(target, drafter), target, 1) > 1e-3

    find(st.tuples(distributions(), distributions()), shows, settings=examples(500))


CASE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)


def frequencies(decide, n: int, first_draft) -> tuple[list[float], float]:
    """How often each token comes first, and how often the draft token was accepted, over n seeds."""
    counts, accepted = Counter(), 0
    for seed in range(n):
        sampling = Sampling(temperature=1.0, seed=seed, position=5)
        draft = first_draft(seed)
        verdict = decide(draft, Verification(logits_of(torch.stack([CASE[0]] * 2))), sampling)
        counts[verdict.committed(draft)[0]] += 1
        accepted += verdict.n_accepted
    return [counts[x] / n for x in range(V)], accepted / n


def drafted_from(probs: torch.Tensor):
    """A drafter that draws with noise of its own, independent of the target's."""

    def draft(seed: int) -> Draft:
        token_id = Sampling(temperature=1.0, seed=seed + 10**9).draw(probs, 0)
        return Draft([token_id], probs=probs.unsqueeze(0))

    return draft


N = 4000
TOLERANCE = 5 * math.sqrt(0.25 / N)
"""Five standard deviations of the least certain frequency: a false alarm in 10**6 runs, and the seeds are fixed."""


@pytest.mark.parametrize("policy", [RejectionPolicy(), BlockPolicy(), CoupledPolicy()])
def test_the_worked_example_has_the_targets_frequencies(policy):
    """p = (.5, .3, .2), q = (.7, .2, .1): p comes out; rejection accepts 0.8 of the drafts."""
    observed, accepted = frequencies(policy.decide, N, drafted_from(CASE[1]))
    assert observed == pytest.approx(CASE[0].tolist(), abs=TOLERANCE)
    if not isinstance(policy, CoupledPolicy):
        assert accepted == pytest.approx(0.8, abs=TOLERANCE)


def test_a_one_hot_draft_is_accepted_as_often_as_the_target_says_it():
    """Draft token 0 without probabilities: p comes out, acceptance 0.5."""
    for policy in (RejectionPolicy(), BlockPolicy(), CoupledPolicy()):
        observed, accepted = frequencies(policy.decide, N, lambda seed: Draft([0]))
        assert observed == pytest.approx(CASE[0].tolist(), abs=TOLERANCE)
        assert accepted == pytest.approx(0.5, abs=TOLERANCE)


class ResidualIsTheTarget(RejectionPolicy):
    def decide(self, draft, verification, sampling):
        verdict = super().decide(draft, verification, sampling)
        if verdict.n_accepted == len(draft):
            return verdict
        return Verdict(0, sampling.draw(sampling.probabilities(verification.logits[0]), 0, anew=True))


def test_the_frequencies_show_the_two_bugs_of_the_field():
    """Residual from the target gives (.60, .26, .14); a greedy draft judged by its softmax (.714, .143, .143)."""
    observed, _ = frequencies(ResidualIsTheTarget().decide, N, drafted_from(CASE[1]))
    assert observed == pytest.approx([0.60, 0.26, 0.14], abs=TOLERANCE)
    greedy = Draft([0], probs=CASE[1].unsqueeze(0))
    observed, _ = frequencies(RejectionPolicy().decide, N, lambda seed: greedy)
    assert observed == pytest.approx([0.714, 0.143, 0.143], abs=TOLERANCE)


def test_coupling_with_a_drafter_that_shares_the_noise_accepts_most():
    """A stochastic drafter that draws with the same noise is accepted more often than one with noise of its own."""

    def sharing(seed: int) -> Draft:
        return Draft([Sampling(temperature=1.0, seed=seed, position=5).draw(CASE[1], 0)])

    _, shared = frequencies(CoupledPolicy().decide, N, sharing)
    _, independent = frequencies(CoupledPolicy().decide, N, drafted_from(CASE[1]))
    assert shared > 0.7 > 0.5 > independent


@given(st.data(), st.integers(0, 2**63), st.integers(0, 5))
def test_coupled_emits_what_plain_sampling_would_for_any_draft(data, seed, k):
    """Each emitted token is the target's own for its position, whatever was drafted, with whatever probabilities."""
    rows = torch.stack([data.draw(distributions(5)) for _ in range(k + 1)])
    draft = Draft(data.draw(st.lists(st.integers(0, 4), min_size=k, max_size=k)), probs=rows[:k])
    sampling = Sampling(temperature=1.0, seed=seed, position=7)
    own = [sampling.at(7 + i).choose(logits_of(row)) for i, row in enumerate(rows)]
    emitted = CoupledPolicy().decide(draft, Verification(logits_of(rows)), sampling).committed(draft)
    assert list(emitted) == own[: len(emitted)]


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({}, [0.5, 0.3, 0.2]),
        ({"top_k": 2}, [0.625, 0.375, 0.0]),
        ({"top_k": 99}, [0.5, 0.3, 0.2]),
        ({"top_p": 0.6}, [0.625, 0.375, 0.0]),
        ({"top_p": 0.5}, [1.0, 0.0, 0.0]),
        ({"min_p": 0.5}, [0.625, 0.375, 0.0]),
        ({"temperature": 0.5}, [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        ({"temperature": 0.0}, [1.0, 0.0, 0.0]),
        ({"top_k": 1}, [1.0, 0.0, 0.0]),
    ],
)
def test_temperature_and_cuts_are_those_of_plain_sampling(options, support):
    """Worked by hand for p = (.5, .3, .2); a cut token is never emitted, though it is what is drafted."""
    sampling = Sampling(**{"temperature": 1.0, **options})
    logits = logits_of(CASE[0])
    assert sampling.probabilities(logits).tolist() == pytest.approx(support, abs=1e-12)
    for policy in (RejectionPolicy(), BlockPolicy(), CoupledPolicy()):
        for seed in range(50):
            sampling = Sampling(**{"temperature": 1.0, **options}, seed=seed)
            draft = Draft([2])
            verdict = policy.decide(draft, Verification(torch.stack([logits, logits])), sampling)
            assert all(support[token] > 0 for token in verdict.committed(draft))


@pytest.mark.parametrize("width", [2, 3, 6])
def test_probabilities_of_another_width_are_padded_or_cut(width):
    """A drafter whose vocabulary is padded differently: missing ids have probability 0."""
    probs = torch.full((1, width), 1 / width, dtype=torch.float64)
    padded = rejection.draft_distributions(Draft([1], probs=probs))(0, 4)
    assert padded.tolist() == pytest.approx([1 / width] * min(width, 4) + [0.0] * max(0, 4 - width))


def test_equal_distributions_accept_everything_and_never_draw_from_an_empty_residual():
    """p == q: acceptance 1; the residual, all zero, is replaced by the target."""
    probs = CASE[0].unsqueeze(0)
    logits = logits_of(torch.cat([probs, probs]))
    for seed in range(100):
        for policy in (RejectionPolicy(), BlockPolicy()):
            draft = Draft([seed % 3], probs=probs)
            sampling = Sampling(temperature=1.0, seed=seed)
            assert policy.decide(draft, Verification(logits), sampling).n_accepted == 1
    assert rejection.residual(CASE[0].numpy(), CASE[0].numpy()).tolist() == CASE[0].tolist()


def test_noise_is_keyed_by_seed_and_position_alone():
    """The same numbers at the same absolute position, different ones elsewhere; the global generators are untouched."""
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    probs = torch.full((50,), 1 / 50, dtype=torch.float64)
    drawn = {
        (seed, p): Sampling(temperature=1.0, seed=seed).at(p).draw(probs, 0) for seed in range(5) for p in range(9)
    }
    assert all(
        Sampling(temperature=1.0, seed=seed).at(p - row).draw(probs, row) == token
        for (seed, p), token in drawn.items()
        for row in range(p + 1)
    )
    assert len(set(drawn.values())) > 20
    assert torch.equal(before, torch.random.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()
    sampling = Sampling(temperature=1.0, seed=1, position=3)
    assert sampling.draw(probs, 0) == sampling.draw(probs, 0)
    assert sampling.uniform(0) == sampling.at(0).uniform(3) != sampling.uniform(1)


def test_greedy_refuses_to_sample():
    """A policy that cannot honour a temperature says so."""
    with pytest.raises(InvalidRequestError, match=r"temperature=0\.5, but the policy 'greedy' never samples"):
        GreedyPolicy().decide(EMPTY_DRAFT, Verification(torch.zeros(1, 3)), Sampling(temperature=0.5))


@pytest.mark.parametrize(
    ("policy", "token", "kept"),
    [
        (MarginPolicy(margin=0.25), 1, 1),
        (MarginPolicy(margin=0.15), 1, 0),
        (MarginPolicy(margin=0.9), 2, 0),
        (MarginPolicy(margin=0.0), 0, 1),
        (TypicalPolicy(epsilon=0.09), 2, 1),
        (TypicalPolicy(epsilon=0.25, alpha=10.0), 2, 0),
        (TypicalPolicy(epsilon=0.25, alpha=0.3), 2, 1),
    ],
)
def test_lossy_policies_keep_what_they_say(policy, token, kept):
    """p = (.5, .3, .2): margin 0.2 to the runner-up; entropy 1.0297, so exp(−H) = 0.357."""
    assert not policy.lossless
    logits = logits_of(torch.stack([CASE[0]] * 2))
    assert policy.decide(Draft([token]), Verification(logits), Sampling(temperature=1.0)).n_accepted == kept


@pytest.mark.parametrize("policy", [RejectionPolicy(), BlockPolicy()])
def test_a_draft_that_cannot_come_from_its_own_probabilities_is_refused(policy):
    """A token of probability 0 was not drawn from them; the message names it."""
    draft = Draft([2], probs=torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64))
    verification = Verification(logits_of(torch.stack([CASE[0]] * 2)))
    with pytest.raises(PluginError, match="draft token 2 at row 0 has no probability"):
        policy.decide(draft, verification, Sampling(temperature=1.0))


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-30, 1e-7])
@pytest.mark.parametrize("policy", [CoupledPolicy(), RejectionPolicy(), BlockPolicy()])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 2}])
def test_a_tiny_temperature_gives_the_greedy_tokens(policy, temperature, cuts):
    """Nothing overflows into NaN; the largest logit wins whatever the noise."""
    target = TableLM(9, seed=4, levels=50)
    own = target.greedy((1, 2), 12)
    for seed in range(3):
        sampling = Sampling(temperature=temperature, seed=seed, **cuts)
        drafter = FunctionDrafter(lambda token_ids, k: [*own[len(token_ids) - 2 :][:2], 3][:k])
        emissions = run(
            (1, 2), drafter=drafter, verifier=target, policy=policy, sampling=sampling, stopping=Stopping(12)
        )
        assert tokens_of(emissions) == own
