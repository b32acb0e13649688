"""Logits processors under speculation: each position sees what plain decoding would have shown it.

Position i of a block is processed with ``input_ids`` = prompt + committed + ``draft[:i]``. A processor with a state is
copied for each position, and the copy that stands where the step ended is kept: so it has seen every committed token
once and no rejected one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from quasar.errors import InvalidRequestError, PluginError
from quasar.loop.sampling import is_choosable
from quasar.types import Draft, Verification

Processor = Callable[[Tensor, Tensor], Tensor]
"""Called with ``input_ids`` ``[1, T]`` and ``scores`` ``[1, V]``, returns scores; as transformers' LogitsProcessor."""

_STATELESS = (
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)


class Processing:
    """The processors of one sequence, and how far they have come.

    Args:
        prompt_ids: The prompt.
        processors: In order. Plain functions must be pure; objects may have a state that ``copy.deepcopy`` copies.

    Raises:
        InvalidRequestError: A processor is not callable, or its state cannot be copied.
    """

    def __init__(self, prompt_ids: Sequence[int], processors: Sequence[Processor] = ()) -> None:
        self._token_ids = list(prompt_ids)
        self._processors = [_checked_copy(processor) for processor in processors]
        self._after_row: list[list[Processor]] = []

    def apply(self, verification: Verification, draft: Draft) -> Verification:
        """Process ``[k+1, V]`` logits, each row as if the draft before it had been accepted."""
        if not self._processors:
            return verification
        rows, processors, self._after_row = [], self._processors, []
        for i in range(len(draft) + 1):
            processors = [_copy(processor) for processor in processors]
            input_ids = torch.tensor([[*self._token_ids, *draft.token_ids[:i]]], device=verification.logits.device)
            scores = verification.logits[i : i + 1].clone()
            for processor in processors:
                scores = _checked_scores(processor(input_ids, scores), scores, processor)
            rows.append(scores)
            self._after_row.append(processors)
            if not is_choosable(scores[0]):
                # A dead end of the draft, which plain decoding may never come to: an error only if the policy does.
                rows += [scores] * (len(draft) - i)
                break
        return Verification(torch.cat(rows), verification.hidden_states)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that one step added."""
        self._token_ids += token_ids
        if self._processors:
            self._processors = self._after_row[len(token_ids) - 1]


def _checked_scores(scores: Any, given: Tensor, processor: Processor) -> Tensor:
    if not isinstance(scores, Tensor) or scores.shape != given.shape:
        name = getattr(processor, "__name__", type(processor).__name__)
        got = f"scores of shape {list(scores.shape)}" if isinstance(scores, Tensor) else f"{scores!r:.40}"
        raise PluginError(f"logits processor {name} returned {got}, expected [1, V] = {list(given.shape)}")
    return scores


def _copy(processor: Processor) -> Processor:
    return processor if isinstance(processor, _STATELESS) else copy.deepcopy(processor)


def _checked_copy(processor: Any) -> Processor:
    name = type(processor).__name__
    if not callable(processor):
        raise InvalidRequestError(f"logits processor {processor!r:.80} is no function of (input_ids, scores)")
    try:
        return _copy(processor)
    except Exception as error:
        raise InvalidRequestError(
            f"logits processor {name} has a state that cannot be copied, so it cannot be replayed by position: {error}"
        ) from error
