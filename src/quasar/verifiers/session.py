"""What sessions over a key-value cache have in common: which tokens are committed, and which the cache still lacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, cat

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.loop.prefix import common_prefix_length
from quasar.options import integer
from quasar.types import Draft, Verification


def checked_prompt(prompt_ids: Sequence[int], vocab_size: int, max_length: int | None, reason: str = "") -> list[int]:
    """The prompt, as a list.

    Args:
        reason: Why the context is shorter than the model's, where it is.

    Raises:
        InvalidRequestError: It has no token, one outside the vocabulary, or more than the context holds.
    """
    if not prompt_ids or not all(0 <= token_id < vocab_size for token_id in prompt_ids):
        what = "is empty" if not prompt_ids else f"has ids outside 0…{vocab_size - 1}"
        raise InvalidRequestError(f"the prompt {what}; give at least one token of the model's vocabulary")
    if max_length is not None and len(prompt_ids) > max_length:
        why = f" ({reason})" if reason else ""
        raise InvalidRequestError(
            f"the prompt has {len(prompt_ids)} tokens, but the model's context is {max_length}{why}; shorten the prompt"
        )
    return list(prompt_ids)


class CachedSession(ABC):
    """A verify session that is prefillable, restartable and closable, over a cache that a subclass brings.

    Between steps the cache holds all committed tokens but the last. After a start or a restart it holds fewer; what it
    lacks is computed by :meth:`prefill`, or with the next draft.

    A prompt that starts from nothing is computed in pieces that end at fixed positions, and apart from any draft: so
    its keys and values have the same bits however it is cut and whatever is drafted. Where that makes no difference, a
    subclass sets ``piece`` to ``None``.

    Args:
        prompt_ids: At least one token, each of the vocabulary.
        features: Names of what each verification carries beside logits.

    Attributes:
        prompt_features: ``[n, D]`` of each name, of the n positions that :meth:`prefill` has computed from the start.
    """

    piece: int | None = 512

    def __init__(self, prompt_ids: Sequence[int], features: frozenset[str] = frozenset()) -> None:
        self.features = features
        self.prompt_features: dict[str, Tensor] = {}
        self._token_ids = list(prompt_ids)
        self._prompt_end = len(prompt_ids) - 1
        self._closed = False

    @property
    @abstractmethod
    def cached_length(self) -> int:
        """Positions in the cache; between steps one less than the committed tokens."""

    @abstractmethod
    def _truncate(self, length: int) -> None:
        """Forget all but the first ``length`` positions."""

    @abstractmethod
    def _forward(self, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        """Append positions to the cache; ``[n_logits, V]`` logits of the last of them.

        Args:
            as_prompt: Nothing is verified: the width may change bits, and features are wanted of all positions.
        """

    @abstractmethod
    def _free(self) -> None:
        """Give the memory of the cache back."""

    @property
    def pending(self) -> int:
        """Committed tokens but the last that are not cached."""
        return max(0, len(self._token_ids) - 1 - self.cached_length)

    def prefill(self, max_rows: int) -> None:
        """Compute about ``max_rows`` of what is pending: at least one piece, otherwise no more than that.

        Raises:
            InvalidRequestError: ``max_rows`` is no integer of at least 1, or the session is closed.
        """
        self._check_open()
        integer(at_least=1).check("max_rows", max_rows, who="prefill")
        left = max_rows
        while self.pending > 0 and left > 0:
            begin, end = self.cached_length, self._next_end(left)
            if left < max_rows and end - begin > left:
                return  # a piece that does not fit any more
            self._note_features(self._forward(self._token_ids[begin:end], 0, as_prompt=begin < self._prompt_end))
            self._check_cached(end)
            left -= end - begin

    def verify(self, draft: Draft) -> Verification:
        """``[k+1, V]`` logits of a draft of k tokens; what is pending of a prompt is computed before.

        Raises:
            InvalidRequestError: The session is closed.
        """
        self._check_open()
        self._truncate(min(self.cached_length, len(self._token_ids) - 1))  # a draft that was verified, and not judged
        if self.features or self.cached_length < self._prompt_end:
            while self.pending > 0:
                self.prefill(self.pending)
        behind = self._token_ids[self.cached_length :]  # the last token alone, unless the session was restarted
        verification = self._forward((*behind, *draft.token_ids), len(draft) + 1, as_prompt=False)
        self._check_cached(len(self._token_ids) + len(draft))
        return verification

    def commit(self, token_ids: Sequence[int]) -> None:
        self._check_open()
        self._token_ids += token_ids
        self._truncate(min(self.cached_length, len(self._token_ids) - 1))

    def restart(self, token_ids: Sequence[int]) -> None:
        """Become the session of ``token_ids``, keeping what is cached of a common beginning."""
        self._check_open()
        cached = min(common_prefix_length(self._token_ids, token_ids), self.cached_length, len(token_ids) - 1)
        if self.features:
            cached = 0  # those of earlier steps are gone
        self.prompt_features = {}
        self._truncate(cached)
        self._token_ids = list(token_ids)
        self._prompt_end = len(token_ids) - 1 if cached == 0 else min(self._prompt_end, cached)

    def close(self) -> None:
        """Free the cache; nothing can be computed afterwards."""
        if not self._closed:
            self._closed = True
            self._free()

    def _next_end(self, rows: int) -> int:
        begin, end = self.cached_length, len(self._token_ids) - 1
        if begin >= self._prompt_end or self.piece is None:
            return min(end, begin + rows)
        return min(self._prompt_end, (begin // self.piece + 1) * self.piece)

    def _note_features(self, computed: Verification) -> None:
        for name, rows in computed.features.items():
            known = self.prompt_features.get(name)
            self.prompt_features[name] = rows if known is None else cat((known, rows))

    def _check_cached(self, expected: int) -> None:
        if self.cached_length != expected:
            raise UnsupportedModelError(
                f"the model was given {expected} positions and has cached {self.cached_length}; it needs a key-value "
                "cache of transformers' kind, which it updates with every layer"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the session is closed; start another one")
