"""A sequence as an object: suspended, taken up again, interleaved, restarted, closed; and faults that are named."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.drafters.function import FunctionDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import InvalidRequestError, PluginError
from quasar.loop.checks import start_drafting
from quasar.loop.decode import reference_decode, speculate
from quasar.loop.decoding import Decoding, PlainDecoding
from quasar.loop.sampling import Sampling
from quasar.loop.stopping import Stopping
from quasar.policies.coupled import CoupledPolicy
from quasar.testing.fakes import TableLM, TableSession, scripted
from quasar.testing.running import examples
from quasar.types import EMPTY_DRAFT, Draft, Verification
from strategies import Case, cases


def decoding_of(case: Case, **parts: object) -> Decoding:
    how = {"drafter": FunctionDrafter(case.drafter()), "policy": CoupledPolicy(), "verifier": case.target(), **parts}
    stopping = Stopping(case.max_new_tokens, eos_token_ids=case.eos_token_ids)
    return Decoding(case.prompt_ids, sampling=Sampling(temperature=0.8, seed=case.seed), stopping=stopping, **how)


def alone(case: Case) -> list[int]:
    stopping = Stopping(case.max_new_tokens, eos_token_ids=case.eos_token_ids)
    sampling = Sampling(temperature=0.8, seed=case.seed)
    one = PlainDecoding(case.prompt_ids, verifier=case.target(), sampling=sampling, stopping=stopping)
    return [token_id for step in reference_decode(one) for token_id in step.emission.token_ids]


def test_sequences_driven_by_a_scheduler_say_what_each_says_alone():
    """Any order of asking and answering: drafts of all are collected, then verified, then settled, in orders drawn."""
    seen: Counter[str] = Counter()

    @given(st.lists(cases(), min_size=2, max_size=4), st.randoms(use_true_random=False))
    @examples(100)
    def check(many: list[Case], order) -> None:
        running = [decoding_of(case) for case in many]
        outputs: list[list[int]] = [[] for _ in many]
        for one in running:
            assert one.prefill() == 0
        while alive := [i for i, one in enumerate(running) if one.finish_reason is None]:
            chosen = order.sample(alive, order.randint(1, len(alive)))
            drafts = {i: running[i].propose() for i in chosen}
            raws = {i: running[i].verify(drafts[i]) for i in reversed(chosen)}
            for i in order.sample(chosen, len(chosen)):
                outputs[i] += running[i].settle(drafts[i], raws[i]).emission.token_ids
            seen["several at once"] += len(chosen) > 1
            seen["one waits"] += len(chosen) < len(alive)
            seen["one has ended, another goes on"] += len(alive) < len(running)
        assert outputs == [alone(case) for case in many]

    check()
    assert min(seen.values()) >= 10, seen
    assert len(seen) == 3


class Chunked(TableSession):
    """A session whose prompt is computed piece by piece; verifying before that is a mistake."""

    def __init__(self, lm: TableLM, prompt_ids) -> None:
        super().__init__(lm, prompt_ids)
        self.pending, self.pieces, self.closed = len(prompt_ids) - 1, [], False

    def prefill(self, max_rows: int) -> None:
        self.pieces.append(min(max_rows, self.pending))
        self.pending -= self.pieces[-1]

    def verify(self, draft: Draft):
        assert self.pending == 0
        return super().verify(draft)

    def close(self) -> None:
        self.closed = True


class ChunkedLM(TableLM):
    def start(self, prompt_ids, needs=frozenset()):
        self.sessions.append(Chunked(self, prompt_ids))
        return self.sessions[-1]


class Curious(EmptyDrafter):
    """Notes the session that it is started with, and how much of the prompt that still lacks."""

    def __init__(self) -> None:
        self.targets: list[Chunked] = []
        self.pending: list[int] = []

    def start(self, prompt_ids, sampling, target):
        self.targets.append(target)
        self.pending.append(target.pending)
        return self


def curious_decoding(drafter: object, target: TableLM) -> Decoding:
    stopping = Stopping(4)
    parts = {"verifier": target, "sampling": Sampling(), "stopping": stopping}
    return Decoding([1] * 8, drafter=drafter, policy=CoupledPolicy(), **parts)


def test_a_prompt_can_be_computed_in_pieces_and_the_drafter_starts_behind_it():
    """Nothing is computed before it is asked for; the drafter is given the session that will verify its drafts."""
    target, drafter = ChunkedLM(9), Curious()
    one = curious_decoding(drafter, target)
    assert target.sessions == []
    assert [one.prefill(3), one.prefill(3)] == [4, 1]
    assert drafter.targets == []
    assert one.prefill(3) == 0
    (session,) = target.sessions
    assert session.pieces == [3, 3, 1]
    assert (drafter.targets, drafter.pending) == ([session], [0])
    tokens = [token_id for step in speculate(one) for token_id in step.emission.token_ids]
    assert tokens == target.greedy([1] * 8, 4)
    assert len(target.sessions) == 1


def test_a_prompt_that_nobody_cuts_is_computed_at_once():
    target = ChunkedLM(9)
    list(speculate(curious_decoding(EmptyDrafter(), target)))
    assert target.sessions[0].pieces == [7]


def test_a_session_that_does_not_get_on_with_its_prompt_is_named():
    class Stuck(ChunkedLM):
        def start(self, prompt_ids, needs=frozenset()):
            session = super().start(prompt_ids, needs)
            session.prefill = lambda max_rows: None
            return session

    with pytest.raises(PluginError, match=r"Chunked.prefill\(7\) left 7 tokens pending"):
        list(speculate(curious_decoding(EmptyDrafter(), Stuck(9))))


def test_a_decoding_that_is_closed_frees_its_session():
    """Where the session can be closed; before it was started there is nothing to free."""
    target = ChunkedLM(9)
    one = curious_decoding(EmptyDrafter(), target)
    one.close()
    assert target.sessions == []
    one.prefill()
    one.close()
    assert target.sessions[0].closed
    plain = curious_decoding(EmptyDrafter(), TableLM(9))
    plain.prefill()
    plain.close()


def test_a_drafter_that_was_written_for_two_arguments_goes_on_to_work():
    class Old(EmptyDrafter):
        def start(self, prompt_ids, sampling):
            self.started = list(prompt_ids)
            return self

    drafter = Old()
    target = TableLM(9)
    tokens = [t for step in speculate(curious_decoding(drafter, target)) for t in step.emission.token_ids]
    assert tokens == target.greedy([1] * 8, 4)
    assert drafter.started == [1] * 8
    start_drafting(FunctionDrafter(scripted(1, [1], 1)), [1], Sampling(), target.start([1]))


def test_a_restarted_decoding_is_one_that_was_started_so():
    """Whatever it had decoded before, and whether its sessions can restart or not."""

    @given(cases(), cases(), st.integers(0, 3))
    @examples(100)
    def check(first: Case, second: Case, n_steps: int) -> None:
        one = decoding_of(first)
        for _, _ in zip(range(n_steps), speculate(one), strict=False):
            pass
        prompt = [token_id % first.vocab_size for token_id in second.prompt_ids]
        sampling = Sampling(temperature=0.8, seed=5)
        one.restart(prompt, sampling=sampling, stopping=Stopping(12))
        tokens = [token_id for step in speculate(one) for token_id in step.emission.token_ids]
        fresh = PlainDecoding(prompt, verifier=first.target(), sampling=sampling, stopping=Stopping(12))
        assert tokens == [token_id for step in reference_decode(fresh) for token_id in step.emission.token_ids]

    check()


class Raises:
    """Stands in for one method of a strategy or a session."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, *arguments: object, **named: object) -> object:
        raise self.error


@pytest.mark.parametrize(
    ("who", "method"),
    [("drafter", "start"), ("drafter", "propose"), ("drafter", "commit"), ("policy", "decide"), ("verifier", "start")],
)
def test_what_a_strategy_raises_is_named_with_the_strategy_and_the_method(who, method):
    """The cause stays chained; an error of ours passes as it is."""
    for error, kind in ((KeyError("gone"), PluginError), (InvalidRequestError("refused"), InvalidRequestError)):
        parts = {"drafter": EmptyDrafter(), "policy": CoupledPolicy(), "verifier": TableLM(9)}
        setattr(parts[who], method, Raises(error))
        one = Decoding([1], sampling=Sampling(), stopping=Stopping(3), **parts)
        with pytest.raises(kind) as caught:
            list(speculate(one))
        if kind is PluginError:
            assert str(caught.value) == f"{type(parts[who]).__name__}.{method} raised KeyError: 'gone'"
            assert caught.value.__cause__ is error
        else:
            assert caught.value is error


@pytest.mark.parametrize(
    ("probs", "shown"),
    [([[0.5, 0.5]], "of type list"), (torch.ones(2), r"of shape \[2\]"), (torch.ones(3, 9), r"\[3, 9\]")],
)
def test_probabilities_that_are_no_matrix_with_a_row_a_token_are_named(probs, shown):
    drafter = EmptyDrafter()
    drafter.propose = lambda max_tokens: Draft([1, 2], probs)
    with pytest.raises(PluginError, match=rf"EmptyDrafter proposed 2 tokens with probs .*{shown}; expected"):
        list(speculate(curious_decoding(drafter, TableLM(9))))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("x", "returned str, expected a Verification"),
        (Verification([1.0]), r"returned logits of type list, expected \[k\+1, V\] = \[1, 9\]"),
        (Verification(torch.ones(1, 8)), r"returned logits of shape \[1, 8\], expected .* = \[1, 9\]"),
    ],
)
def test_what_a_verifier_says_is_checked_to_be_logits(said, message):
    target = TableLM(9)
    one = curious_decoding(EmptyDrafter(), target)
    one.verifying.verify = lambda draft: said
    with pytest.raises(PluginError, match=message):
        list(speculate(one))


def test_a_verdict_that_is_none_is_named():
    policy = CoupledPolicy()
    policy.decide = lambda draft, verification, sampling: None
    one = Decoding(
        [1], drafter=EmptyDrafter(), policy=policy, verifier=TableLM(9), sampling=Sampling(), stopping=Stopping(3)
    )
    with pytest.raises(PluginError, match=r"CoupledPolicy\.decide returned None, expected a Verdict"):
        list(speculate(one))


def test_a_draft_may_be_verified_again_before_it_is_settled():
    """Asking twice changes nothing: the object holds what is committed, and nothing of what is only drafted."""
    target = TableLM(30, seed=3)
    output = target.greedy([1, 2], 12)
    drafter = FunctionDrafter(scripted(2, output, 4))
    one = Decoding(
        [1, 2], drafter=drafter, policy=CoupledPolicy(), verifier=target, sampling=Sampling(), stopping=Stopping(12)
    )
    one.prefill()
    tokens: list[int] = []
    while one.finish_reason is None:
        one.verify(EMPTY_DRAFT)
        draft = one.propose()
        one.verify(draft)
        tokens += one.settle(draft, one.verify(draft)).emission.token_ids
    assert tokens == output
