"""New text, token by token: which characters are final, and where a stop string begins.

Decoding token by token and joining is wrong: a character may span tokens, and many tokenizers render a token
differently at the start of a text. So a short window of tokens is decoded anew each time, and what might still change
is held back: an unfinished UTF-8 sequence (byte-level tokenizers render it as one trailing U+FFFD) and a run of
byte-fallback tokens such as ``<0xE2>``, which decoders read as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_BYTE_FALLBACK = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def decode_tokens(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The one way in which Quasar turns token ids into text: special tokens dropped, no white space tidied up."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class IncrementalText:
    """The text of the new tokens of one sequence.

    Args:
        tokenizer: A transformers tokenizer; used, not mutated.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        # ids[:_settled] have rendered to _settled_text for good; the window that is decoded anew starts before that.
        self._window = 0
        self._settled = 0
        self._settled_text = ""
        self._settled_in_window = ""
        self._tail = ""
        self._stable_in_tail = 0
        self._length_before = 0

    @property
    def text(self) -> str:
        """All text so far; its end may still change."""
        return self._settled_text + self._tail

    @property
    def stable_text(self) -> str:
        """The leading part of :attr:`text` that later tokens cannot change."""
        return self._settled_text + self._tail[: self._stable_in_tail]

    def append(self, token_id: int) -> None:
        """Take in the next token."""
        self._length_before = len(self._settled_text) + self._stable_in_tail
        self._token_ids.append(token_id)
        in_window = decode_tokens(self._tokenizer, self._token_ids[self._window :])
        tail = in_window[len(self._settled_in_window) :]
        # A token that shows nothing, such as a special one, does not end a run of bytes either.
        if tail == self._tail:
            return
        self._tail = tail
        if self._is_byte_fallback(token_id):
            return
        self._stable_in_tail = len(self._tail) - self._tail.endswith(_REPLACEMENT)
        if self._stable_in_tail == len(self._tail):
            self._settle(in_window)

    def find_new(self, strings: Sequence[str]) -> int | None:
        """Where the first of ``strings`` begins that the last token completed; ``None`` if it completed none."""
        text = self.text
        begin = max(0, self._length_before - max(map(len, strings)) + 1)
        found = [index for string in strings if (index := text.find(string, begin)) >= 0]
        return min(found, default=None)

    def _settle(self, in_window: str) -> None:
        self._settled_text += self._tail
        self._tail, self._stable_in_tail = "", 0
        # The window must begin with a token that shows: decoders may strip the space that a text begins with.
        narrower = decode_tokens(self._tokenizer, self._token_ids[self._settled :])
        if narrower:
            self._window = self._settled
        self._settled, self._settled_in_window = len(self._token_ids), narrower or in_window

    def _is_byte_fallback(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return token is not None and _BYTE_FALLBACK.fullmatch(token) is not None


class TextStream:
    """Cuts the text into chunks whose concatenation is the final text.

    Held back until it is settled: characters that may still change, and an end that may be the beginning of a stop
    string, since a stop string is never part of the output.
    """

    def __init__(self, text: IncrementalText, stop: Sequence[str]) -> None:
        self._text = text
        self._stop = stop
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
        """Length of the longest end of ``text`` that begins, but does not complete, a stop string."""
        lengths = (n for string in self._stop for n in range(1, len(string)) if text.endswith(string[:n]))
        return max(lengths, default=0)
