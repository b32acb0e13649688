"""The example is found by its entry point, takes its option from a spec string, and never changes the output."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar import Pipeline, Verification
from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.registry.plugins import load_plugins
from quasar.registry.registry import Registry, default_registry
from quasar.testing import check_drafter
from quasar_example import EchoDrafter

VOCAB_SIZE = 5


class FakeTarget:
    """A target whose next token is a fixed function of the last two; its output repeats itself before long."""

    vocab_size, max_length, invariance, approximations = VOCAB_SIZE, None, "bitwise", ()

    def next_token(self, token_ids):
        return (token_ids[-1] + (2 if token_ids[-2:-1] == [3] else 1)) % VOCAB_SIZE

    def start(self, prompt_ids, needs=frozenset()):
        return FakeSession(self, list(prompt_ids))


class FakeSession:
    """One sequence of it."""

    def __init__(self, target, token_ids):
        self.target, self.token_ids = target, token_ids

    def verify(self, draft):
        contexts = [[*self.token_ids, *draft.token_ids[:i]] for i in range(len(draft) + 1)]
        return Verification(torch.eye(VOCAB_SIZE)[[self.target.next_token(context) for context in contexts]])

    def commit(self, token_ids):
        self.token_ids += token_ids


def plain(prompt_ids, n):
    """The n tokens that follow, one by one."""
    token_ids = list(prompt_ids)
    for _ in range(n):
        token_ids.append(FakeTarget().next_token(token_ids))
    return tuple(token_ids[len(prompt_ids) :])


@pytest.fixture
def only_the_example(monkeypatch):
    """Of all installed plug-ins this one loads."""
    monkeypatch.setenv("QUASAR_PLUGINS", "quasar-example")
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


def test_the_example_is_found_by_its_entry_point(only_the_example):
    """Under the group ``quasar``; what it provides is listed with where it comes from, and nothing is wrong with it."""
    (point,) = (point for point in entry_points(group="quasar") if point.dist.name == "quasar-example")
    assert (point.name, point.value) == ("example", "quasar_example")
    registry = Registry(load_plugins())
    assert registry.problems() == []
    (entry,) = (entry for entry in registry.entries("drafter") if entry.origin.distribution == "quasar-example")
    assert (entry.name, entry.factory) == ("echo", EchoDrafter)
    assert entry.origin.version == point.dist.version


@pytest.mark.parametrize(("spec", "k"), [("echo", 4), ("echo:k=1", 1), ("echo:k=7", 7)])
def test_a_spec_string_chooses_it_and_its_option(only_the_example, spec, k):
    """It then drafts up to k tokens: here those that followed the last 1."""
    drafter = Pipeline(FakeTarget(), drafter=spec).drafter
    assert isinstance(drafter, EchoDrafter)
    draft = drafter.start([1, 2, 3, 4, 0, 2, 3, 4, 0, 1], Sampling(), None).propose(100)
    assert draft.token_ids == (2, 3, 4, 0, 2, 3, 4)[:k]


def test_an_option_that_it_does_not_have_is_refused(only_the_example):
    """With the one that it has."""
    with pytest.raises(
        InvalidRequestError, match=r"drafter 'echo' of quasar-example .* has no option 'n'; its options: k"
    ):
        default_registry().build("drafter", "echo:n=3")


@pytest.mark.parametrize("k", [1, 4, 9])
def test_it_keeps_the_protocol(k):
    """Everything that a drafter promises, in one line."""
    check_drafter(EchoDrafter(k))


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8), st.integers(1, 40), st.integers(0, 9))
def test_the_output_is_the_target_s_own(prompt_ids, max_new_tokens, k):
    """For any prompt, budget and k, tokens equal plain decoding."""
    pipe = Pipeline(FakeTarget(), drafter=EchoDrafter(k))
    assert pipe.generate_ids(prompt_ids, max_new_tokens=max_new_tokens).token_ids == plain(prompt_ids, max_new_tokens)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8), st.integers(1, 40), st.integers(0, 99))
def test_sampled_output_is_the_target_s_own_as_well(prompt_ids, max_new_tokens, seed):
    """With the same seed it says the same with the drafter and without it."""
    pipe = Pipeline(FakeTarget(), drafter=EchoDrafter(3))
    settings = {"max_new_tokens": max_new_tokens, "temperature": 0.7, "seed": seed}
    assert pipe.generate_ids(prompt_ids, **settings).token_ids == pipe.reference(prompt_ids, **settings).token_ids


def test_some_of_its_guesses_are_accepted_and_some_are_not():
    """Some, not all: otherwise the equality above would be tested with right or with wrong guesses only."""
    stats = Pipeline(FakeTarget(), drafter=EchoDrafter(4)).generate_ids([3, 0, 2], max_new_tokens=60).stats
    assert stats["accepted_tokens"] > 10
    assert stats["drafted_tokens"] > stats["accepted_tokens"]


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "draft"),
    [
        ([1], 5, ()),
        ([1, 2, 3], 5, ()),
        ([1, 1], 5, (1,)),
        ([1, 2, 3, 1], 5, (2, 3, 1)),
        ([1, 2, 3, 1], 2, (2, 3)),
        ([1, 2, 3, 1], 0, ()),
        ([1, 9, 1, 2, 3, 1], 1, (2,)),
    ],
)
def test_it_repeats_what_followed_the_latest_occurrence(token_ids, max_tokens, draft):
    """And nothing where the last token is new or no token is wanted."""
    assert EchoDrafter().start(token_ids, Sampling(), None).propose(max_tokens).token_ids == draft


def test_two_sequences_do_not_share_what_was_said():
    """What is committed to one session is not seen by another, and the caller's prompt is left alone."""
    drafter, prompt_ids = EchoDrafter(), [1, 2, 1]
    one, other = drafter.start(prompt_ids, Sampling(), None), drafter.start(prompt_ids, Sampling(), None)
    one.commit((3, 4, 1), None)
    assert one.propose(9).token_ids == (3, 4, 1)
    assert other.propose(9).token_ids == (2, 1)
    assert prompt_ids == [1, 2, 1]
