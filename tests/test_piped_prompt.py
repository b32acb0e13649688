"""What is piped into ``quasar generate`` is the prompt, but for the newline that the shell put behind it."""

from __future__ import annotations

import io
import sys

import pytest

from quasar.commands.cli.prompt import prompt_of


@pytest.mark.parametrize(
    ("piped", "prompt"),
    [
        ("Why?\n", "Why?"),
        ("Why?", "Why?"),
        ("def f():\n\n", "def f():\n"),
        ("one\n two\n", "one\n two"),
        ("\ufeffWhy?\n", "Why?"),
        ("Why? \n", "Why? "),
    ],
)
@pytest.mark.parametrize("argument", [None, "-"])
def test_one_newline_at_the_end_is_dropped_and_no_more(monkeypatch, argument, piped, prompt):
    """``echo`` and editors end with one, which nobody means; with --raw the model would go on behind it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    assert prompt_of(argument, None, raw=True) == prompt


def test_an_argument_is_left_as_it_is():
    """Whoever writes a newline there means it."""
    assert prompt_of("Why?\n", None, raw=True) == "Why?\n"


def test_a_piped_prompt_after_a_system_message_ends_likewise(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Why?\n"))
    assert prompt_of(None, "Be brief.", raw=False)[-1] == {"role": "user", "content": "Why?"}
