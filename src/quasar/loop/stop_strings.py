"""Stop strings in text that is still being made: where one begins, and what may yet become one.

A stop string may hold special tokens (``"<|im_end|>"``), also where the text that a user sees does not show them. It is
then looked for in a second text that does, and what was found is counted back to the one that is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from quasar.errors import InvalidRequestError
from quasar.loop.detokenize import IncrementalText, special_tokens_of


def checked_stops(stop: object) -> tuple[str, ...]:
    """Stop strings as a tuple, of one or several.

    Raises:
        InvalidRequestError: One is empty, or no string.
    """
    stops = (stop,) if isinstance(stop, str) or not isinstance(stop, Sequence) else tuple(stop)
    for string in stops:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"stop={list(stops)!r}: each stop must be a non-empty string")
    return stops


class StopStrings:
    """Finds stop strings in the text of one sequence.

    Args:
        text: The text that is shown; who makes it appends to it before it asks here.
        stop: The strings. None of them: nothing is ever found.
    """

    def __init__(self, text: IncrementalText, stop: Sequence[str]) -> None:
        self._text = text
        self._stop = tuple(stop)
        self._hidden = _hidden_in(text)
        self._marked = [string for string in stop if _shown(string, self._hidden) != string]
        self._whole = IncrementalText(text.tokenizer, skip_special_tokens=False) if self._marked else None

    def find_new(self, token_id: int) -> int | None:
        """Where the shown text must end because of its last token, ``token_id``; ``None``: it goes on."""
        found = [self._text.find_new(self._stop)] if self._stop else []
        if self._whole is not None:
            self._whole.append(token_id)
            begin = self._whole.find_new(self._marked)
            if begin is not None:
                after = _shown(self._whole.text[begin:], self._hidden)
                found.append(max(0, len(self._text.text) - len(after)))
        return min((end for end in found if end is not None), default=None)


def _hidden_in(text: IncrementalText) -> re.Pattern[str] | None:
    """What the text does not show."""
    special = special_tokens_of(text.tokenizer) if text.skip_special_tokens else ()
    longest_first = sorted(special, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if special else None


def _shown(string: str, hidden: re.Pattern[str] | None) -> str:
    """What is left of a string in a text that does not show ``hidden``."""
    return string if hidden is None else hidden.sub("", string)


class TextStream:
    """Cuts the text into chunks whose concatenation is the final text.

    Held back until it is settled: characters that may still change, and an end that may be the beginning of a stop
    string, since a stop string is never part of the output.
    """

    def __init__(self, text: IncrementalText, stop: Sequence[str]) -> None:
        self._text = text
        stops = checked_stops(stop)
        beginnings = {string[:n] for string in stops for n in range(1, len(string))}
        shown = {_shown(string, _hidden_in(text)) for string in stops} - set(stops)
        self._beginnings = beginnings | {string[:n] for string in shown for n in range(1, len(string) + 1)}
        self._emitted = 0

    def advance(self) -> str:
        """The text that has become final since the last call."""
        stable = self._text.stable_text
        return self._emit(stable, len(stable) - self._possible_stop(stable))

    def finish(self, end: int | None) -> str:
        """The rest, up to ``end`` characters of the whole text (``None``: all of it)."""
        text = self._text.text
        return self._emit(text, len(text) if end is None else end)

    def _emit(self, text: str, end: int) -> str:
        chunk = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return chunk

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that may be the beginning of a stop string."""
        return max((len(beginning) for beginning in self._beginnings if text.endswith(beginning)), default=0)
