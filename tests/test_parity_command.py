"""``quasar parity``: at which widths it measures."""

from __future__ import annotations

import json

import pytest

from quasar.testing.models import tiny
from toys import word_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A folder with a tiny model and its tokenizer."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    tiny("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ([], list(range(1, 17))),
        (["--widths", "2"], [2]),
        (["--widths", "20, 1,3 - 4,4"], [1, 3, 4, 20]),
    ],
)
def test_the_widths_are_those_that_are_asked_for(quasar_command, saved, options, measured):
    """In order, each once, as keys of the JSON."""
    arguments = ["parity", "--quantizer", "none", "--verifier", "causal_lm", "--tokens", "20", "--model", saved]
    status, out, _ = quasar_command(*arguments, *options, "--json")
    assert status == 0
    assert list(json.loads(out)["widths"]) == [str(width) for width in measured]


@pytest.mark.parametrize("widths", ["0", "a", "", "1,,2", "4-2", "1-", "-3", "1.5"])
def test_what_is_no_width_is_refused_before_a_model_is_loaded(quasar_command, widths):
    """With what would be one."""
    status, out, err = quasar_command("parity", "--model", "./nowhere", f"--widths={widths}")
    assert (status, out) == (2, "")
    assert err == f"quasar: --widths {widths}: give numbers of at least 1 and ranges of them, such as 1-16,24,32\n"


def test_a_width_beyond_the_tokens_is_refused_with_how_many_it_takes(quasar_command):
    """A forward of so many positions takes so many tokens; nor is a range spelled out for that."""
    status, _, err = quasar_command("parity", "--model", "./nowhere", "--widths", "1-16,20-1000000000000")
    assert status == 2
    assert err == (
        "quasar: --widths 1-16,20-1000000000000: 1000000000000 positions a forward need --tokens 1000000000000 at "
        "least\n"
    )
