"""Logits processors under speculation: each position sees what plain decoding would have shown it.

Position i of a draft is processed with ``input_ids`` = prompt + committed + ``draft[:i]``. A processor with a state is
copied for each position, and the copy that stands where the step ended is kept: so it has seen every committed token
once and no rejected one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError, NumericalError, PluginError, QuasarError
from quasar.loop.penalties import MinNewTokens, NoRepeatNgram, RepetitionPenalty
from quasar.loop.rows import NoTokenError, as_array, best_place
from quasar.types import Draft, Verification

Processor = Callable[[Tensor, Tensor], Tensor]
"""Called with ``input_ids`` ``[1, T]`` and ``scores`` ``[1, V]``, returns scores; as transformers' LogitsProcessor."""

_STATELESS = (MinNewTokens, NoRepeatNgram, RepetitionPenalty)
"""Of exactly these types; a subclass may have a state."""

_STATELESS_IN_TRANSFORMERS = {
    "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "MinLengthLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "SuppressTokensLogitsProcessor",
}
"""Likewise, by name: transformers is not imported for it."""

_PIECE = 2**14
"""Numbers in a tensor with which torch wakes no other thread."""


class Processing:
    """The processors of one sequence, and how far they have come.

    Args:
        prompt_ids: The prompt.
        processors: In order. Plain functions must be pure; objects may have a state that ``copy.deepcopy`` copies. A
            model in it is shared by the copies.

    Raises:
        InvalidRequestError: A processor is not callable, or its state cannot be copied.
    """

    def __init__(self, prompt_ids: Sequence[int], processors: Sequence[Processor] = ()) -> None:
        self._token_ids = torch.tensor([*prompt_ids], dtype=torch.int64)
        for processor in processors:
            _check_callable(processor)
        self._processors: Sequence[Processor] = [_copy(processor) for processor in processors]
        self._rows: ProcessedRows | None = None

    def apply(self, verification: Verification, draft: Draft) -> Verification:
        """The same verification with ``[k+1, V]`` processed logits, each row as if the draft before it were accepted.

        A row is processed when it is asked for, after those before it.
        """
        if not self._processors:
            return verification
        self._rows = ProcessedRows(verification.logits, self._followed_by(draft.token_ids), self._processors)
        return ProcessedVerification(verification, self._rows)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that one step added."""
        if self._rows is not None:
            self._processors = self._rows.processors_after(len(token_ids) - 1)
            self._rows = None
        if self._processors:
            self._token_ids = self._followed_by(token_ids)

    def _followed_by(self, token_ids: Sequence[int]) -> Tensor:
        return torch.cat((self._token_ids, torch.tensor([*token_ids], dtype=torch.int64)))


class ProcessedRows(Sequence[Tensor]):
    """Rows of logits that processors change, each when it is first asked for.

    Raises, where a row is asked for:
        PluginError: A processor failed on it, or on one before it.
        NumericalError: The processors left no token to choose from.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, processors: Sequence[Processor]) -> None:
        self._logits = logits
        self._input_ids = token_ids.unsqueeze(0).to(logits.device)
        self._rows: list[Tensor] = []
        self._after: list[Sequence[Processor]] = [processors]
        self._fault: QuasarError | None = None

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, number: int) -> Tensor:  # type: ignore[override]  # no slices: a row at a time
        while len(self._rows) <= number:
            if self._fault is not None:
                raise self._fault
            try:
                self._process_next()
            except QuasarError as fault:
                self._fault = fault
        return self._rows[number]

    def processors_after(self, number: int) -> Sequence[Processor]:
        """The processors as they are when row ``number`` has been processed."""
        self[number]
        return self._after[number + 1]

    def stacked(self) -> Tensor:
        """``[k+1, V]``: all rows, in NaN from the first one on that cannot be had."""
        rows = []
        for number in range(len(self)):
            try:
                rows.append(self[number])
            except QuasarError:
                rows.append(torch.full_like(self._logits[number], float("nan")))
        return torch.stack(rows)

    def _process_next(self) -> None:
        row = len(self._rows)
        processors = [_copy(processor) for processor in self._after[row]]
        input_ids = self._input_ids[:, : self._input_ids.shape[1] - len(self) + 1 + row]
        scores = _copied(self._logits[row : row + 1])
        for processor in processors:
            scores = _processed(processor, input_ids, scores)
        try:
            best_place(as_array(scores[0]))
        except NoTokenError as error:
            best_place(as_array(self._logits[row]))  # raises where the target's own row is at fault
            raise NumericalError("the logits processors leave no token to choose from") from error
        self._rows.append(scores[0])
        self._after.append(processors)


class ProcessedVerification(Verification):
    """A verification whose logits are processed row by row."""

    def __init__(self, raw: Verification, rows: ProcessedRows) -> None:
        for field in attrs.fields(Verification):
            if field.name != "logits":
                object.__setattr__(self, field.name, getattr(raw, field.name))
        object.__setattr__(self, "_processed", rows)

    @property
    def rows(self) -> Sequence[Tensor]:
        return self._processed  # type: ignore[attr-defined,no-any-return]

    @functools.cached_property
    def logits(self) -> Tensor:
        return self._processed.stacked()  # type: ignore[attr-defined,no-any-return]


def _copied(row: Tensor) -> Tensor:
    """A copy of ``[1, V]``, made piece by piece: torch copies a whole vocabulary with several threads."""
    if row.device.type != "cpu":
        return row.clone()
    copied = torch.empty_like(row)
    for to, piece in zip(copied.split(_PIECE, dim=1), row.split(_PIECE, dim=1), strict=True):
        to.copy_(piece)
    return copied


def _processed(processor: Processor, input_ids: Tensor, scores: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            returned = processor(input_ids, scores)
    except QuasarError:
        raise
    except Exception as error:
        raise PluginError(f"logits processor {_name_of(processor)} failed: {type(error).__name__}: {error}") from error
    if not isinstance(returned, Tensor) or returned.shape != scores.shape:
        got = f"scores of shape {list(returned.shape)}" if isinstance(returned, Tensor) else f"{returned!r:.40}"
        raise PluginError(
            f"logits processor {_name_of(processor)} returned {got}, expected [1, V] = {list(scores.shape)}"
        )
    return returned.detach()


def _name_of(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _shared_modules(processor: Any) -> dict[int, Any]:
    """The modules that a processor holds, as what ``copy.deepcopy`` takes for copied already."""
    shared: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [processor]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            shared[id(thing)] = thing
        else:
            waiting += _parts(thing)
    return shared


def _parts(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, MethodType):
        return [thing.__self__]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, Tensor | type | FunctionType):
        return []
    return list(getattr(thing, "__dict__", {}).values())


def _check_callable(processor: Any) -> None:
    if not callable(processor):
        raise InvalidRequestError(f"logits processor {processor!r:.80} is no function of (input_ids, scores)")


def _copy(processor: Processor) -> Processor:
    """A copy of the state; models and modules in it are shared.

    Raises:
        InvalidRequestError: It cannot be copied.
    """
    if _is_stateless(type(processor)):
        return processor
    try:
        return copy.deepcopy(processor, _shared_modules(processor))
    except Exception as error:
        raise InvalidRequestError(
            f"logits processor {_name_of(processor)} has a state that cannot be copied, so it cannot be replayed by "
            f"position: {type(error).__name__}: {error}"
        ) from error


def _is_stateless(kind: type) -> bool:
    of_transformers = kind.__module__ == "transformers.generation.logits_process"
    return kind in _STATELESS or (of_transformers and kind.__name__ in _STATELESS_IN_TRANSFORMERS)
