"""The settings of one generation, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs

from quasar.errors import InvalidRequestError
from quasar.stopping import Criterion

if TYPE_CHECKING:
    from transformers import StoppingCriteria


class Settings(TypedDict, total=False):
    """Keyword arguments of the calls of a Pipeline; see :class:`Request`."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: str | Sequence[str] | None
    seed: int
    stopping_criteria: Criterion | StoppingCriteria | Sequence[Criterion | StoppingCriteria] | None
    eos_token_id: int | Sequence[int] | Literal["model"] | None
    raw: bool


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """Several values, one alone, or none, as a tuple."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (values,)


def _as_ids(token_ids: Any) -> Any:
    return tuple(token_ids) if isinstance(token_ids, Iterable) and not isinstance(token_ids, str) else token_ids


@attrs.frozen(kw_only=True)
class Request:
    """What one generation was asked for.

    Args:
        max_new_tokens: Budget, at least 1; prompt and budget together must fit the model's context.
        temperature: 0 is greedy; sampling is not supported yet and refused.
        top_k: Keep the k most probable tokens; without effect on greedy output.
        top_p: Keep the most probable tokens that add up to p; without effect on greedy output.
        stop: Stop string, several or none, looked for in the new text. The text ends before the first that occurs; the
            tokens end with the one that completed it.
        seed: For sampling; greedy output does not depend on it.
        stopping_criteria: Functions of the list of new tokens, asked after each one and true to stop; or transformers'
            ``StoppingCriteria``, which get prompt and new tokens as a ``[1, T]`` tensor. One, several or none.
        eos_token_id: One id, several, or ``None`` for none; ``"model"``: what the model's configuration says.
        raw: Take a text as it is, without the model's chat template.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    seed: int = 0
    stopping_criteria: tuple[Criterion | StoppingCriteria, ...] = attrs.field(default=(), converter=_as_tuple)
    eos_token_id: int | tuple[int, ...] | Literal["model"] | None = attrs.field(default="model", converter=_as_ids)
    raw: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Request:
        """Check the keyword arguments of a call.

        Raises:
            InvalidRequestError: An unknown setting, a value out of range, or sampling.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in settings:
            if name not in known:
                raise InvalidRequestError(f"there is no setting {name!r}; settings: {', '.join(known)}")
        request = cls(**settings)
        request._check()
        return request

    def _check(self) -> None:
        if not _is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            raise InvalidRequestError(f"max_new_tokens={self.max_new_tokens!r}: give an integer of at least 1")
        self._check_stops()
        self._check_sampling()

    def _check_stops(self) -> None:
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise InvalidRequestError(f"stop={list(self.stop)!r}: each stop must be a non-empty string")
        for criterion in self.stopping_criteria:
            if not callable(criterion):
                raise InvalidRequestError(
                    f"stopping_criteria: {criterion!r} is not callable; give functions of the list of new tokens, or "
                    "transformers' StoppingCriteria"
                )
        if self.eos_token_id != "model" and not all(map(_is_integer, _as_tuple(self.eos_token_id))):
            raise InvalidRequestError(
                f"eos_token_id={self.eos_token_id!r}: give an integer, several, None for none, or 'model'"
            )

    def _check_sampling(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise InvalidRequestError(f"temperature={self.temperature!r}: give a number of at least 0")
        if self.temperature > 0:
            raise InvalidRequestError(
                f"temperature={self.temperature}: sampling is not supported yet; use temperature=0 (greedy)"
            )
        if not _is_integer(self.seed):
            raise InvalidRequestError(f"seed={self.seed!r}: give an integer")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            raise InvalidRequestError(f"top_k={self.top_k!r}: give an integer of at least 1, or None")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise InvalidRequestError(f"top_p={self.top_p!r}: give a number above 0 and up to 1, or None")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
