"""Sessions over a cache: prompts in pieces, restarts, features, and the end of a session."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.loop.checks import prefill
from quasar.testing.models import random_prompt, tiny
from quasar.types import EMPTY_DRAFT, Draft
from quasar.verifiers.causal_lm import CausalLMSession, CausalLMVerifier

MODEL = tiny("llama")
VERIFIER = CausalLMVerifier(MODEL)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """So that a prompt of a tiny model has several."""
    monkeypatch.setattr(CausalLMSession, "piece", 8)


def test_where_a_prompt_is_cut_changes_no_bit():
    """Whatever ``max_rows`` says, also not at all; and the pieces are computed when they are asked for."""
    cuts = 0

    @given(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=6), st.integers(0, 5))
    def check(length: int, rows: list[int], k: int) -> None:
        nonlocal cuts
        prompt, draft = random_prompt(length, seed=length), Draft(random_prompt(5, seed=k)[:k])
        session, whole = VERIFIER.start(prompt), VERIFIER.start(prompt)
        for n in rows:
            before = session.pending
            session.prefill(n)
            assert before == 0 or before - max(n, 8) <= session.pending < before
            cuts += session.pending > 0
        assert prefill(whole) == 0 == whole.pending
        assert torch.equal(session.verify(draft).logits, whole.verify(draft).logits)
        assert session.cached_length == length + k

    check()
    assert cuts >= 20


def test_nothing_is_computed_before_it_is_asked_for():
    session = VERIFIER.start(random_prompt(20))
    assert (session.cached_length, session.pending) == (0, 19)
    session.prefill(1)
    assert (session.cached_length, session.pending) == (8, 11)
    session.prefill(100)
    assert (session.cached_length, session.pending) == (19, 0)
    with pytest.raises(InvalidRequestError, match="max_rows=0"):
        session.prefill(0)


def test_a_restarted_session_says_what_a_new_one_says():
    """Of a common beginning it keeps what is cached; what it lacks comes with the next draft or before it."""
    kept = 0

    @given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 9), st.integers(0, 3), st.booleans())
    def check(length: int, common: int, tail: int, k: int, fill: bool) -> None:
        nonlocal kept
        prompt = random_prompt(length, seed=length)
        new = [*prompt[:common], *random_prompt(tail + 1, seed=tail + 50)]
        session = VERIFIER.start(prompt)
        session.verify(Draft(random_prompt(3, seed=1)))
        session.restart(new)
        kept += session.cached_length > 0
        if fill:
            prefill(session)
            assert session.cached_length == len(new) - 1
        draft = Draft(random_prompt(3, seed=k)[:k])
        found, expected = session.verify(draft).logits, VERIFIER.start(new).verify(draft).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        session.commit([*draft.token_ids, 5])
        assert session.cached_length == len(new) + k

    check()
    assert kept >= 20


@pytest.mark.parametrize("name", ["hidden:-1", "hidden:0", "hidden:1", "hidden:2", "hidden:-2"])
def test_features_are_the_hidden_states_of_their_index(name):
    """Of the draft with each verification, of the prompt in pieces with the session; as transformers numbers them."""
    tokens = random_prompt(24)
    with torch.no_grad():
        states = MODEL(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = states[int(name.removeprefix("hidden:"))][0]
    session = VERIFIER.start(tokens[:20], frozenset({name}))
    prefill(session, 1)
    torch.testing.assert_close(session.prompt_features[name], expected[:8], rtol=0, atol=1e-4)
    rows = session.verify(Draft(tokens[20:])).features[name]
    torch.testing.assert_close(session.prompt_features[name], expected[:19], rtol=0, atol=1e-4)
    torch.testing.assert_close(rows, expected[19:], rtol=0, atol=1e-4)
    session.restart(tokens[:10])
    session.verify(EMPTY_DRAFT)
    torch.testing.assert_close(session.prompt_features[name], expected[:9], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["hidden:3", "hidden:-4", "hidden", "logits", "hidden_states"])
def test_a_feature_that_there_is_not_is_refused_with_those_that_there_are(name):
    with pytest.raises(UnsupportedModelError, match=rf"needs '{name}'; causal_lm has 'hidden:-1'.*to 'hidden:2'"):
        VERIFIER.start([1], frozenset({name}))


def test_a_closed_session_computes_nothing_more():
    """It says so in one line; closing it again is no mistake."""
    session = VERIFIER.start(random_prompt(9))
    session.verify(EMPTY_DRAFT)
    session.close()
    session.close()
    assert session.cached_length == 0
    calls = (lambda: session.verify(EMPTY_DRAFT), lambda: session.commit([1]), lambda: session.restart([1]))
    for call in (*calls, lambda: session.prefill(1)):
        with pytest.raises(InvalidRequestError, match="the session is closed; start another one"):
            call()
