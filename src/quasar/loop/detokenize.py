"""New text, token by token: which characters are final.

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

_LONGEST_WINDOW = 8
"""Tokens that are decoded anew at most, where all of them have rendered: moving the window costs a decoding itself."""


def decode_tokens(tokenizer: Any, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The one way in which Quasar turns token ids into text: no white space is tidied up."""
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    return text


def special_tokens_of(tokenizer: Any) -> frozenset[str]:
    """The texts of all special tokens, which decoding leaves out where it skips them."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    named = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(filter(None, (*map(str, named), *(token.content for token in added if token.special))))


class IncrementalText:
    """The text of the new tokens of one sequence.

    Args:
        tokenizer: A transformers tokenizer; used, not mutated.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
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
        self._take((token_id,))

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens: the same text, decoded once, unless a run of byte-fallback tokens may end in it."""
        if any(map(self._is_byte_fallback, token_ids)):
            for token_id in token_ids:
                self.append(token_id)
        elif token_ids:
            self._take(token_ids)

    def _take(self, token_ids: Sequence[int]) -> None:
        self._length_before = len(self._settled_text) + self._stable_in_tail
        self._token_ids.extend(token_ids)
        in_window = self._decoded(self._window)
        tail = in_window[len(self._settled_in_window) :]
        # A token that shows nothing, such as a special one, does not end a run of bytes either.
        if tail == self._tail:
            return
        self._tail = tail
        if self._is_byte_fallback(token_ids[-1]):
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
        if len(self._token_ids) - self._window >= _LONGEST_WINDOW:
            # The window must begin with a token that shows: decoders may strip the space that a text begins with.
            narrower = self._decoded(self._settled)
            if narrower:
                self._window, in_window = self._settled, narrower
        self._settled, self._settled_in_window = len(self._token_ids), in_window

    def _decoded(self, begin: int) -> str:
        token_ids = self._token_ids[begin:]
        return decode_tokens(self.tokenizer, token_ids, skip_special_tokens=self.skip_special_tokens)

    def _is_byte_fallback(self, token_id: int) -> bool:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        return token is not None and _BYTE_FALLBACK.fullmatch(token) is not None
