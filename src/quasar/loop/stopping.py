"""The one place where output ends.

Every committed token of every strategy passes :meth:`Stopping.truncate` before it is streamed, cached or shown to a
drafter. Tokens are looked at one by one, in order, so a stop in the middle of an accepted draft ends the output exactly
where plain decoding would have ended it. At one position EOS is named before a stop, and a stop before the length.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from quasar.errors import InvalidRequestError
from quasar.loop.detokenize import IncrementalText
from quasar.loop.stop_strings import StopStrings, checked_stops
from quasar.options import integer
from quasar.types import Emission, FinishReason

Criterion = Callable[[Sequence[int]], bool]
"""Custom stopping criterion: called with all new tokens after each one; true: stop here. It must not keep the list."""


class Stopping:
    """The stops of one generation, and how much of it has been emitted.

    Args:
        max_new_tokens: Budget, at least 1.
        eos_token_ids: End-of-sequence token(s), as :func:`as_token_ids` takes them. The token is emitted.
        stop: Stop strings, looked for in the new text only. The token that completes one is the last one emitted;
            the text ends before the string (see :attr:`text_end`).
        criteria: Custom criteria; the token that fulfils one is the last one emitted.
        text: Where the new text accumulates; needed with ``stop``.

    Raises:
        InvalidRequestError: A budget below 1, an empty stop string, stop strings without ``text``.
    """

    def __init__(
        self,
        max_new_tokens: int,
        *,
        eos_token_ids: Any = None,
        stop: Sequence[str] = (),
        criteria: Sequence[Criterion] = (),
        text: IncrementalText | None = None,
    ) -> None:
        integer(at_least=1).check("max_new_tokens", max_new_tokens)
        self._max_new_tokens = max_new_tokens
        self._eos_token_ids = frozenset(as_token_ids(eos_token_ids))
        self._criteria = tuple(criteria)
        stops = checked_stops(stop)
        if stops and text is None:
            raise InvalidRequestError(f"stop={list(stops)!r} needs a tokenizer, and there is none")
        self._text = text
        self._stop = StopStrings(text, stops) if stops and text is not None else None
        self._token_ids: list[int] = []
        self.text_end: int | None = None
        """Number of characters of the new text that belong to the output; ``None`` while no stop string was met."""

    @property
    def remaining(self) -> int:
        """Tokens left in the budget."""
        return self._max_new_tokens - len(self._token_ids)

    def truncate(self, token_ids: Iterable[int]) -> Emission:
        """Take in the tokens of one step and return those that are output, with the reason if this ends it."""
        emitted: list[int] = []
        reason = None
        for token_id in token_ids:
            emitted.append(token_id)
            reason = self._reason_to_end_at(token_id)
            if reason is not None:
                break
        if self._text is not None and self._stop is None:
            self._text.extend(emitted)
        return Emission(tuple(emitted), reason)

    def _reason_to_end_at(self, token_id: int) -> FinishReason | None:
        self._token_ids.append(token_id)
        if self._text is not None and self._stop is not None:
            self._text.append(token_id)
        if token_id in self._eos_token_ids:
            return "eos"
        if self._stop_string_completed(token_id) or any(criterion(self._token_ids) for criterion in self._criteria):
            return "stop"
        return "length" if self.remaining == 0 else None

    def _stop_string_completed(self, token_id: int) -> bool:
        if self._stop is None:
            return False
        self.text_end = self._stop.find_new(token_id)
        return self.text_end is not None


def as_token_ids(token_ids: Any) -> tuple[int, ...]:
    """End-of-sequence tokens in any form: an integer, several, a tensor or an array of any shape, or ``None``.

    Raises:
        InvalidRequestError: Something in it is no integer.
    """
    if token_ids is None:
        return ()
    values = list(_flat(token_ids))
    if any(isinstance(value, bool) or not hasattr(value, "__index__") for value in values):
        raise InvalidRequestError(f"eos_token_id={token_ids!r}: give an integer, several, None for none, or 'model'")
    return tuple(map(operator.index, values))


def _flat(values: Any) -> Iterator[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        for value in values:
            yield from _flat(value)
    else:
        yield values
