"""The records that stages hand to each other.

Shape letters, here and in every docstring: B batch, T length, k drafted, V vocabulary, D hidden size.
Records that carry tensors compare by identity: ``==`` over tensors is not a truth value.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["eos", "stop", "length"]
ExactTo = Literal["quantized", "full", "target"]


def _as_token_ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(operator.index(token_id) for token_id in token_ids)


@attrs.frozen(eq=False)
class Draft:
    """A chain of k proposed tokens; k may be 0.

    Args:
        token_ids: The proposed tokens in order. Any iterable of integers, a 1-D tensor included.
        probs: ``[k, V]`` probabilities that ``token_ids`` were drawn from; ``None`` means that the drafter is
            deterministic (its distribution is one-hot). Owned by the draft, not mutated by anyone.
    """

    token_ids: tuple[int, ...] = attrs.field(converter=_as_token_ids)
    probs: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def clipped(self, max_tokens: int, vocab_size: int) -> Draft:
        """The leading part that the target can verify: ``max_tokens`` at most, up to an id outside its vocabulary."""
        n = next(
            (i for i, token_id in enumerate(self.token_ids[:max_tokens]) if not 0 <= token_id < vocab_size),
            min(len(self), max(max_tokens, 0)),
        )
        if n == len(self):
            return self
        return Draft(self.token_ids[:n], None if self.probs is None else self.probs[:n])


EMPTY_DRAFT = Draft(())


@attrs.frozen(eq=False)
class Verification:
    """What one forward of the target says about a draft of k tokens.

    Args:
        logits: ``[k+1, V]``, any floating dtype. Row i predicts the token that follows ``draft[:i]``, so row 0 judges
            ``draft[0]`` and row k yields the bonus token.
        features: ``[k+1, D]`` of the same positions by name, as in ``"hidden:-1"``: what the drafter asked for.
    """

    logits: Tensor
    features: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def rows(self) -> Tensor | Sequence[Tensor]:
        """The logits row by row: a processor that changes them runs when a row is asked for, in order."""
        return self.logits


@attrs.frozen
class Verdict:
    """What a policy decided: keep ``n_accepted`` leading draft tokens, then add ``next_token`` (residual or bonus)."""

    n_accepted: int
    next_token: int

    def committed(self, draft: Draft) -> tuple[int, ...]:
        """The ``n_accepted + 1`` tokens that this step adds, before any stop is applied."""
        return (*draft.token_ids[: self.n_accepted], self.next_token)


@attrs.frozen
class Emission:
    """The tokens that one step adds to the output, stops applied.

    Args:
        token_ids: At least one token. All but the last were accepted from the draft.
        finish_reason: Set on the last step only.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@attrs.frozen(eq=False)
class Step:
    """One step of the loop: what it emitted, and the processed logits that the policy saw; row i judged token i."""

    emission: Emission
    verification: Verification


@attrs.frozen
class Chunk:
    """A piece of streamed output: the tokens of one step, and the text (maybe none) that became final with them."""

    text: str
    token_ids: tuple[int, ...]


@attrs.frozen(eq=False)
class Quantized:
    """What a quantizer makes of a model.

    Args:
        model: The quantized copy.
        report: The options, what was quantized, what was not and why; JSON-serialisable.
    """

    model: Any
    report: Mapping[str, Any]


@attrs.frozen
class TokenLogprobs:
    """Natural logarithms of the target's probabilities at one position, before temperature and cuts.

    Args:
        logprob: That of the token that was emitted.
        top: Those of the most probable tokens, most probable first.
    """

    logprob: float
    top: Mapping[int, float]


@attrs.frozen
class GenerationResult:
    """One finished generation.

    Args:
        text: The new text, without special tokens unless asked for; it ends before a stop string.
        token_ids: The new tokens only, with the EOS token or the token that completed the stop string at their end.
        finish_reason: ``"eos"``, ``"stop"`` (stop string or custom criterion) or ``"length"``.
        guarantee: The claim that held for this output, in words; starts with what the output equals.
        logprobs: One entry a token, where they were asked for.
        stats: Counts and seconds; the keys are those of :meth:`quasar.loop.stats.DecodeStats.as_dict`.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    guarantee: str
    stats: Mapping[str, Any]
    logprobs: tuple[TokenLogprobs, ...] | None = None
