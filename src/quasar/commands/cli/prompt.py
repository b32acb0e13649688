"""The prompt of ``quasar generate``: an argument, or what is piped in."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from quasar.errors import QuasarError

if TYPE_CHECKING:
    from quasar.pipeline.prompts import Prompt


def prompt_of(argument: str | None, system: str | None, *, raw: bool) -> Prompt:
    """What to answer, read from standard input if there is no argument or if it is ``-``.

    Raises:
        QuasarError: There is no prompt, a blank one, or a system message that no chat template would take in.
    """
    if system is not None and raw:
        raise click.UsageError("--system needs the model's chat template; leave out --raw")
    text = _piped(asked=argument == "-") if argument in (None, "-") else str(argument)
    if not text.strip() and not (raw and text):
        raise QuasarError("the prompt is blank; write one after 'quasar generate', or pipe one in")
    if system is None:
        return text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _piped(*, asked: bool) -> str:
    """Standard input without the newline that ends its last line, which comes from ``echo`` and from editors."""
    if sys.stdin is None or (sys.stdin.isatty() and not asked):
        raise click.UsageError("there is no prompt; write one after 'quasar generate', or pipe one in")
    try:
        return sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise QuasarError(
            f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}"
        ) from error
