"""Prompt lookup: which continuation is proposed, and that a token costs the same however long the context is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quasar.drafters.ngram import NgramDrafter
from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling


def propose(token_ids, max_tokens=100, **options):
    return list(NgramDrafter(**options).start(token_ids, Sampling(), None).propose(max_tokens).token_ids)


def by_search(token_ids: list[int], k: int, max_n: int, min_n: int) -> list[int]:
    """The definition, by scanning: longest n-gram first, its most recent earlier occurrence, periodic continuation."""
    for n in range(max_n, min_n - 1, -1):
        suffix = token_ids[-n:]
        for begin in range(len(token_ids) - n - 1, -1, -1):
            if len(suffix) == n and token_ids[begin : begin + n] == suffix:
                text = list(token_ids)
                for i in range(k):
                    text.append(text[begin + n + i])
                return text[len(token_ids) :]
    return []


@pytest.mark.parametrize(
    ("token_ids", "options", "draft"),
    [
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], {}, [9, 10, 11, 7, 8]),
        ([5, 6, 7, 8, 9, 10, 11, 7, 8], {"k": 2}, [9, 10]),
        ([1, 2, 9, 1, 2, 8, 1, 2], {"k": 1}, [8]),
        ([3, 1, 2, 7, 2, 8, 3, 1, 2], {"k": 1}, [7]),
        ([3, 1, 2, 7, 2, 8, 3, 1, 2], {"k": 1, "max_n": 1}, [8]),
        ([1, 2, 3], {}, []),
        ([1, 2, 1], {"min_n": 2}, []),
        ([4, 4], {}, [4, 4, 4, 4, 4]),
        ([1, 2, 1, 2], {"k": 3}, [1, 2, 1]),
        ([1], {}, []),
    ],
)
def test_the_longest_ngram_is_continued_as_it_last_was(token_ids, options, draft):
    """Worked by hand: the longest match wins over a shorter, more recent one; repetition continues periodically."""
    assert propose(token_ids, **options) == draft


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 4), st.data())
def test_the_index_finds_what_a_scan_finds(token_ids, k, max_n, data):
    """Built token by token or at once, the index equals the definition."""
    min_n = data.draw(st.integers(1, max_n))
    cut = data.draw(st.integers(1, len(token_ids)))
    drafter = NgramDrafter(k=k, max_n=max_n, min_n=min_n)
    session = drafter.start(token_ids[:cut], Sampling(), None)
    for token_id in token_ids[cut:]:
        session.commit([token_id], None)
    expected = by_search(token_ids, k, max_n, min_n)
    assert list(session.propose(100).token_ids) == expected
    assert propose(token_ids, k=k, max_n=max_n, min_n=min_n) == expected


def test_a_draft_is_no_longer_than_asked():
    """max_tokens caps k, down to nothing."""
    assert propose([4, 4], max_tokens=2) == [4, 4]
    assert propose([4, 4], max_tokens=0) == []
    assert propose([4, 4], max_tokens=-1) == []


class Token(int):
    """A token id that counts how often any of them is looked at, in whatever the session keeps them in."""

    looks = 0

    def __hash__(self):
        Token.looks += 1
        return int.__hash__(self)

    def __eq__(self, other):
        Token.looks += 1
        return int.__eq__(self, other)


def tokens(ids) -> list[Token]:
    return [Token(i) for i in ids]


def test_a_token_costs_the_same_however_long_the_context_is():
    """It is looked at a few times for each n-gram that it is part of, and never again in a context of thousands."""
    session = NgramDrafter().start(tokens([7, 8, 9]), Sampling(), None)
    costs = []
    for step in range(3000):
        before = Token.looks
        session.propose(5)
        session.commit([Token(step % 97)], None)
        costs.append(Token.looks - before)
    assert 0 < max(costs) <= 60


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(TOKENS, st.lists(st.tuples(st.integers(0, 30), TOKENS), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_a_restarted_session_is_a_fresh_one(token_ids, branches, max_n, data):
    """Cut anywhere, a whole new text included, and continued otherwise: what it knows is what a fresh session knows."""
    drafter = NgramDrafter(k=4, max_n=max_n, min_n=data.draw(st.integers(1, max_n)))
    session = drafter.start(token_ids, Sampling(), None)
    for kept, tail in branches:
        token_ids = [*token_ids[:kept], *tail]
        session.restart(token_ids)
        fresh = drafter.start(token_ids, Sampling(), None)
        assert session.propose(9).token_ids == fresh.propose(9).token_ids
        for token_id in [0, 1, 2, 3, *tail]:  # whatever comes next, both go on alike
            for one in (session, fresh):
                one.commit([token_id], None)
            token_ids.append(token_id)
            assert session.propose(9).token_ids == fresh.propose(9).token_ids


def test_a_restart_costs_what_it_differs_by():
    """Ten tokens taken back and ten others put in their place: no more work than that, in a context of thousands."""
    token_ids = tokens(i * 7919 % 97 for i in range(5000))
    session = NgramDrafter().start(token_ids, Sampling(), None)
    before = Token.looks
    session.restart([*token_ids[:-10], *tokens(range(100, 110))])
    assert 0 < Token.looks - before <= 600


def test_sessions_do_not_share_what_they_have_seen():
    """Two sequences over one drafter: each drafts from its own text."""
    drafter = NgramDrafter()
    first, second = drafter.start([1, 2, 1], Sampling(), None), drafter.start([1, 3, 1], Sampling(), None)
    assert first.propose(1).token_ids == (2,)
    assert second.propose(1).token_ids == (3,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k=0, expected an integer of at least 1"),
        ({"k": 1.5}, "k=1.5"),
        ({"k": True}, "k=True"),
        ({"max_n": 0}, "max_n=0"),
        ({"min_n": "a"}, "min_n='a'"),
        ({"min_n": 4}, "min_n=4 is greater than max_n=3"),
    ],
)
def test_bad_options_are_refused(options, message):
    """The message has the option, the value and what would do."""
    with pytest.raises(InvalidRequestError, match=message):
        NgramDrafter(**options)
