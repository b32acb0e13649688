"""The one truncation point: positions, priorities, and bad input."""

from __future__ import annotations

import pytest

from quasar.errors import InvalidRequestError
from quasar.loop.detokenize import IncrementalText
from quasar.loop.stopping import Stopping
from quasar.testing.fakes import ByteTokenizer
from quasar.types import Emission

PIECES = [b"a", b"b", b"c", b"stop", b"stop!", b"st", b"op", b"\xe2\x82", b"\xac", b""]


def stopping(max_new_tokens: int = 100, **options: object) -> Stopping:
    return Stopping(max_new_tokens, text=IncrementalText(ByteTokenizer(PIECES)), **options)


@pytest.mark.parametrize(
    ("options", "drafts", "emitted", "reason", "text_end"),
    [
        ({}, [[0, 1, 2]], [0, 1, 2], None, None),
        ({"max_new_tokens": 2}, [[0, 1, 2]], [0, 1], "length", None),
        ({"max_new_tokens": 3}, [[0, 1, 2]], [0, 1, 2], "length", None),
        ({"eos_token_ids": 1}, [[0, 1, 2]], [0, 1], "eos", None),
        ({"eos_token_ids": [2, 1]}, [[0, 1, 2]], [0, 1], "eos", None),
        ({"eos_token_ids": 0}, [[0, 0, 0]], [0], "eos", None),
        ({"stop": ["b"]}, [[0, 1, 2]], [0, 1], "stop", 1),
        ({"stop": "stop"}, [[0, 4, 2]], [0, 4], "stop", 1),
        ({"stop": ["stop"]}, [[0, 5, 6, 2]], [0, 5, 6], "stop", 1),
        ({"stop": ["stop"]}, [[0, 5], [6, 2]], [0, 5, 6], "stop", 1),
        ({"stop": ["bc", "a"]}, [[1, 2, 0]], [1, 2], "stop", 0),
        ({"stop": ["op", "stop"]}, [[0, 3]], [0, 3], "stop", 1),
        ({"stop": ["€"]}, [[0, 7], [8, 1]], [0, 7, 8], "stop", 1),
        ({"stop": ["b"], "eos_token_ids": 1}, [[0, 1, 2]], [0, 1], "eos", None),
        ({"stop": ["b"], "max_new_tokens": 2}, [[0, 1, 2]], [0, 1], "stop", 1),
        ({"eos_token_ids": 1, "max_new_tokens": 2}, [[0, 1, 2]], [0, 1], "eos", None),
        ({"criteria": [lambda ids: len(ids) == 2]}, [[0, 1, 2]], [0, 1], "stop", None),
        ({"criteria": [lambda ids: len(ids) == 3], "eos_token_ids": 1}, [[0, 1, 2]], [0, 1], "eos", None),
    ],
)
def test_the_earliest_position_ends_the_output(options, drafts, emitted, reason, text_end):
    """EOS, stop strings, criteria and the budget are looked for token by token, also across drafts."""
    stops = stopping(**options)
    emissions = [stops.truncate(draft) for draft in drafts]
    assert [token_id for emission in emissions for token_id in emission.token_ids] == emitted
    assert emissions[-1].finish_reason == reason
    assert stops.text_end == text_end


def test_remaining_counts_down_by_emitted_tokens():
    """Tokens that were cut off do not use up the budget."""
    stops = stopping(5, eos_token_ids=2)
    assert stops.remaining == 5
    assert stops.truncate([0, 1]) == Emission((0, 1))
    assert stops.remaining == 3
    stops.truncate([2, 0])
    assert stops.remaining == 2


@pytest.mark.parametrize("max_new_tokens", [0, -1, 1.5, True, None, "3"])
def test_a_budget_below_one_or_no_integer_is_refused(max_new_tokens):
    """The message has the value and what would do."""
    with pytest.raises(InvalidRequestError, match=r"max_new_tokens=.*give an integer of at least 1"):
        Stopping(max_new_tokens)


@pytest.mark.parametrize("stop", [[""], ["a", ""], [3]])
def test_an_empty_stop_string_is_refused(stop):
    """An empty string is found everywhere."""
    with pytest.raises(InvalidRequestError, match="non-empty string"):
        stopping(stop=stop)


def test_stop_strings_need_text():
    """Without a tokenizer there is no text to look in."""
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        Stopping(3, stop=["a"])
