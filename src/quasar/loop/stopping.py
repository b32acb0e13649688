"""The one place where output ends.

Every committed token of every strategy passes :meth:`Stopping.truncate` before it is streamed, cached or shown to a
drafter. Tokens are looked at one by one, in order, so a stop in the middle of an accepted block ends the output exactly
where plain decoding would have ended it. At one position EOS is named before a stop, and a stop before the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quasar.errors import InvalidRequestError
from quasar.loop.detokenize import IncrementalText
from quasar.types import Emission, FinishReason

Criterion = Callable[[Sequence[int]], bool]
"""Custom stopping criterion: called with all new tokens after each one; true: stop here. It must not keep the list."""


class Stopping:
    """The stops of one generation, and how much of it has been emitted.

    Args:
        max_new_tokens: Budget, at least 1.
        eos_token_ids: End-of-sequence token(s): an integer, several, or ``None`` for none. The token is emitted.
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
        eos_token_ids: int | Iterable[int] | None = None,
        stop: Sequence[str] = (),
        criteria: Sequence[Criterion] = (),
        text: IncrementalText | None = None,
    ) -> None:
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens={max_new_tokens!r}: give an integer of at least 1")
        self._max_new_tokens = max_new_tokens
        self._eos_token_ids = _as_id_set(eos_token_ids)
        self._stop = _checked_stops(stop)
        self._criteria = tuple(criteria)
        if self._stop and text is None:
            raise InvalidRequestError(f"stop={list(self._stop)!r} needs a tokenizer, and there is none")
        self._text = text
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
        for token_id in token_ids:
            emitted.append(token_id)
            reason = self._reason_to_end_at(token_id)
            if reason is not None:
                return Emission(tuple(emitted), reason)
        return Emission(tuple(emitted))

    def _reason_to_end_at(self, token_id: int) -> FinishReason | None:
        self._token_ids.append(token_id)
        if self._text is not None:
            self._text.append(token_id)
        if token_id in self._eos_token_ids:
            return "eos"
        if self._stop_string_completed() or any(criterion(self._token_ids) for criterion in self._criteria):
            return "stop"
        return "length" if self.remaining == 0 else None

    def _stop_string_completed(self) -> bool:
        if not self._stop or self._text is None:
            return False
        self.text_end = self._text.find_new(self._stop)
        return self.text_end is not None


def _as_id_set(token_ids: int | Iterable[int] | None) -> frozenset[int]:
    if token_ids is None:
        return frozenset()
    return frozenset((token_ids,) if isinstance(token_ids, int) else token_ids)


def _checked_stops(stop: Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for string in stops:
        if not isinstance(string, str) or not string:
            raise InvalidRequestError(f"stop={list(stops)!r}: each stop must be a non-empty string")
    return stops
