"""What a value must be, and the one line that says so."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from quasar.drafters.nested import DraftLengths
from quasar.drafters.ngram import NgramDrafter
from quasar.errors import InvalidRequestError
from quasar.options import choice, flag, integer, number, optional, plain_number
from quasar.policies.margin import MarginPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("expectation", "words", "fits", "others"),
    [
        (integer(), "an integer", [0, -5, 2**70, np.int8(3)], [1.0, True, "1", None, np.bool_(True), NAN]),
        (integer(at_least=1), "an integer of at least 1", [1, np.uint8(9)], [0, -1, 1.5]),
        (integer(at_least=1, at_most=8), "an integer from 1 to 8", [1, 8], [0, 9]),
        (number(), "a number", [0, -1.5, np.float32(2)], [INF, NAN, "1", None, True, 1j]),
        (number(at_least=0), "a number of at least 0", [0, 1e300], [-1e-9, INF, NAN]),
        (number(above=0), "a number above 0", [1e-300], [0, -1, INF]),
        (number(at_least=0, at_most=1), "a number from 0 to 1", [0, 0.5, 1], [-0.1, 1.1]),
        (number(above=0, at_most=1), "a number above 0 and up to 1", [0.1, 1], [0, 1.1]),
        (number(above=0, below=1), "a number above 0 and below 1", [0.5], [0, 1]),
        (choice("a", 2), "one of a, 2", ["a", 2], ["b", 2.0, None]),
        (choice(1), "1", [1], [True]),
        (flag(), "true or false", [True, False], [0, 1, "true", None]),
        (optional(flag()), "true or false, or None", [None, True], [0]),
    ],
)
def test_a_value_fits_or_is_refused_by_name(expectation, words, fits, others):
    assert expectation.expected == words
    for value in fits:
        expectation.check("x", value)
    for value in others:
        with pytest.raises(InvalidRequestError) as caught:
            expectation.check("x", value)
        assert str(caught.value) == f"x={value!r}: give {words}"


def test_an_attrs_class_says_who_refuses():
    @attrs.frozen
    class Drafter:
        called = "ngram"
        k: int = attrs.field(default=5, converter=plain_number, validator=integer(at_least=1))

    assert Drafter(k=np.int64(3)).k == 3
    with pytest.raises(InvalidRequestError) as caught:
        Drafter(k=0)
    assert str(caught.value) == "ngram: k=0, expected an integer of at least 1"


@pytest.mark.parametrize("value", [np.int64(4), np.array(4), np.array([4]), torch.tensor(4), torch.tensor([[4]])])
def test_a_number_becomes_python_s_own(value):
    assert type(plain_number(value)) is int
    assert plain_number(value) == 4


@pytest.mark.parametrize("value", ["4", None, [4], 4.5, np.array([4, 5]), torch.ones(2)])
def test_what_is_no_single_number_is_left_as_it_is(value):
    assert plain_number(value) is value


def test_a_long_value_is_one_short_line():
    with pytest.raises(InvalidRequestError) as caught:
        integer().check("x", "a\n" * 1000)
    assert len(str(caught.value)) < 120
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "plain", "value"),
    [
        (lambda value: NgramDrafter(k=value).k, 4, np.int64(4)),
        (lambda value: DraftLengths(k=value).k, 16, np.int32(16)),
        (lambda value: DraftLengths(min_margin=value).min_margin, 0.25, np.float32(0.25)),
        (lambda value: MarginPolicy(margin=value).margin, 0.5, np.float32(0.5)),
        (lambda value: TypicalPolicy(epsilon=value).epsilon, 0.5, np.float64(0.5)),
        (lambda value: W8A8Quantizer(group=value).describe()["group"], 32, np.int64(32)),
        (lambda value: W8A8Quantizer(alpha=value).describe()["alpha"], 0.5, np.float32(0.5)),
    ],
)
def test_options_take_numbers_of_numpy_and_keep_python_s_own(build, plain, value):
    assert build(value) == plain
    assert type(build(value)) is type(plain)
