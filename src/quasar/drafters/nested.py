"""A whole inner loop as a drafter: the cascade.

Drafter and verifier of the inner loop propose a draft to the target of the outer loop, which verifies it in one
forward; the outer loop does not know that its drafter is one. With a quantized copy of the target inside, most drafts
are confirmed whole, so the target runs once for 16 to 32 tokens and its own output comes out. (Staged and cascaded
speculation: Spector & Re 2023, arXiv 2308.04623; Chen et al. 2023, arXiv 2312.11462.)

The inner loop draws with ``coupled``: given the noise its tokens are a function of the inner target, they have exactly
its distribution, and under an outer ``coupled`` they are the outer target's wherever the two models agree enough. For
an outer policy that judges probabilities, each draft is drawn with noise of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from quasar.errors import InvalidRequestError, NumericalError
from quasar.loop.checks import bind_drafter, quantize
from quasar.loop.decode import speculate
from quasar.loop.decoding import Decoding
from quasar.loop.prefix import common_prefix_length
from quasar.loop.processing import Processing, Processor
from quasar.loop.sampling import Sampling
from quasar.loop.stopping import Stopping
from quasar.options import flag, integer, number, option
from quasar.policies.coupled import CoupledPolicy
from quasar.protocols import Drafter, DraftSession, Quantizer, Verifier, VerifySession
from quasar.registry.registry import AUTO, default_registry
from quasar.types import EMPTY_DRAFT, Draft, Step, Verification

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@attrs.frozen
class DraftLengths:
    """How long the drafts of a nested drafter are; its options in one record, checked.

    Args:
        k: Tokens of the first draft, at least 1.
        min_k: See ``max_k``.
        max_k: Drafts grow to this while they are confirmed whole, and shrink towards ``min_k`` while they are not.
        min_margin: End a draft early after a token that the inner target preferred to the runner-up by less than this,
            in nats: there the outer target is likely to choose otherwise. 0: never. Not where probabilities are given,
            for a token is then judged by its probability and not by who came second.
        with_probs: Give the inner target's probabilities with each draft, also where the policy does not ask for them
            (``Sampling.wants_probs``).
    """

    k: int = option(24, integer(at_least=1))
    min_k: int = option(8, integer(at_least=1))
    max_k: int = option(32, integer(at_least=1))
    min_margin: float = option(0.5, number(at_least=0))
    with_probs: bool = option(False, flag())

    def __attrs_post_init__(self) -> None:
        if not self.min_k <= self.k <= self.max_k:
            shown = f"k={self.k}, min_k={self.min_k}, max_k={self.max_k}"
            raise InvalidRequestError(f"{shown}; expected 1 ≤ min_k ≤ k ≤ max_k")


class NestedDrafter:
    """Proposes what an inner drafter and an inner verifier decode.

    Args:
        drafter: Drafts in the inner loop; another NestedDrafter makes a cascade of three levels.
        verifier: Verifies in the inner loop, usually with a quantized copy of the outer target. Its vocabulary may have
            another size: ids that it lacks are shown to it as 0.
        k, min_k, max_k, min_margin, with_probs: As of :class:`DraftLengths`.
        vocab_size: V of the outer target: ids from there on are never drafted. ``None``: the inner target has no more.
        report: What a quantizer says of the inner target; ``None`` where none made it.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        drafter: Drafter,
        verifier: Verifier,
        *,
        k: int = 24,
        min_k: int = 8,
        max_k: int = 32,
        min_margin: float = 0.5,
        with_probs: bool = False,
        vocab_size: int | None = None,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        self.drafter, self.verifier, self.report = drafter, verifier, report
        self.lengths = DraftLengths(k, min_k, max_k, min_margin, with_probs)
        cut = vocab_size is not None and vocab_size < verifier.vocab_size
        self.processors: tuple[Processor, ...] = (_only_ids_below(vocab_size),) if cut and vocab_size else ()

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> NestedSession:
        return NestedSession(self, prompt_ids, sampling)


class CascadeDrafter:
    """A model drafts for itself: a quantized copy of it, with a drafter of its own, decodes the drafts.

    It drafts once it is bound to the model. What ``bind`` returns is a :class:`NestedDrafter`.

    Args:
        drafter: Drafts for the copy: spec string, Drafter or function. It is bound to the full model too, so another
            CascadeDrafter makes a cascade of three levels.
        quantizer: Spec string or Quantizer. The copy shares every tensor that quantizing does not change.
        verifier: Runs the copy: spec string, or a function from the copy to a Verifier; ``"auto"`` as for a pipeline.
        k, min_k, max_k, min_margin, with_probs: As of :class:`DraftLengths`.

    Raises:
        InvalidRequestError: A name, an option or a value of any of these that is not one; before there is a model.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        drafter: str | Drafter | Callable[[list[int], int], Iterable[int]] = "ngram",
        quantizer: str | Quantizer = "w8a8",
        verifier: str | Callable[[Any], Verifier] = AUTO,
        k: int = 24,
        min_k: int = 8,
        max_k: int = 32,
        min_margin: float = 0.5,
        with_probs: bool = False,
    ) -> None:
        registry = default_registry()
        self._drafter: Drafter = registry.build("drafter", drafter)
        self._quantizer: Quantizer = registry.build("quantizer", quantizer)
        registry.check_verifier(verifier)
        self._verifier = verifier
        self._lengths = DraftLengths(k, min_k, max_k, min_margin, with_probs)

    def bind(self, model: PreTrainedModel, tokenizer: Any, calibration: Sequence[Tensor] | None) -> NestedDrafter:
        """Quantize the model; see :class:`quasar.protocols.Bindable`."""
        drafter = bind_drafter(self._drafter, model, tokenizer, calibration)
        made = quantize(self._quantizer, model, calibration)
        verifier: Verifier = default_registry().build_verifier(self._verifier, made.model)
        return NestedDrafter(drafter, verifier, report=made.report, **attrs.asdict(self._lengths))

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> DraftSession:
        raise InvalidRequestError(
            "nested: there is no model to quantize; make the pipeline of a model (Pipeline.from_model, "
            "from_pretrained), or give NestedDrafter a verifier of your own"
        )


class NestedSession:
    """The inner loop over one sequence, which may be ahead of what the outer target has confirmed."""

    def __init__(self, options: NestedDrafter, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._options = options
        self._with_probs = options.lengths.with_probs or sampling.wants_probs
        self._sampling = attrs.evolve(sampling, wants_probs=False)  # the policy of the inner loop reads none
        self._k = options.lengths.k
        self._ahead: list[int] = []
        self._confirmed = self._legible(prompt_ids)
        self._inner = Decoding(
            list(self._confirmed),
            drafter=options.drafter,
            policy=CoupledPolicy(),
            verifier=options.verifier,
            sampling=self._sampling,
            stopping=Stopping(self._k),
        )
        if self._room >= 1:
            self._inner.prefill()

    def propose(self, max_tokens: int) -> Draft:
        k = int(min(self._k, max_tokens, self._room))
        if k < 1:
            return EMPTY_DRAFT
        probs: list[Tensor] = []
        with suppress(NumericalError):  # a dead end of the inner target's, which the outer one may never come to
            for step in self._speculate(k):
                self._ahead += step.emission.token_ids
                if self._with_probs:
                    n = len(step.emission.token_ids)
                    probs += [self._sampling.probabilities(step.verification.rows[row]) for row in range(n)]
                elif self._is_unsure(step):
                    break
        return Draft(self._ahead, torch.stack(probs) if probs else None)

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        if self._ahead:
            self._adapt(common_prefix_length(self._ahead, token_ids))
        self._confirmed += self._legible(token_ids)
        self._ahead = []

    def restart(self, token_ids: Sequence[int]) -> None:
        self._confirmed, self._ahead = self._legible(token_ids), []

    @property
    def _room(self) -> float:
        """Tokens that the inner target's context still holds; what is confirmed may have outgrown it."""
        return (self._options.verifier.max_length or float("inf")) - len(self._confirmed)

    def _legible(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens as the inner target gets to see them."""
        return [token_id if token_id < self._options.verifier.vocab_size else 0 for token_id in token_ids]

    def _speculate(self, k: int) -> Iterator[Step]:
        """The inner loop over the next k tokens, from what is confirmed."""
        here = self._sampling.at(len(self._confirmed))
        self._inner.restart(
            list(self._confirmed),
            sampling=here.apart() if self._with_probs else here,
            stopping=Stopping(k),
            processing=Processing(self._confirmed, self._options.processors),
        )
        return speculate(self._inner)

    def _is_unsure(self, step: Step) -> bool:
        """Whether some choice of a step, whose tokens are the last of those ahead, was a narrow one."""
        min_margin = self._options.lengths.min_margin
        if min_margin == 0:
            return False
        n = len(step.emission.token_ids)
        here = self._sampling.at(len(self._confirmed) + len(self._ahead) - n)
        margins = (here.margin(step.verification.rows[row], row) for row in range(n))
        return any(margin < min_margin for margin in margins)

    def _adapt(self, survived: int) -> None:
        """A draft confirmed whole makes the next one longer; otherwise it moves towards what survived."""
        longer = self._k + self._k // 2 if survived == len(self._ahead) else (self._k + survived) // 2 + 1
        self._k = max(self._options.lengths.min_k, min(self._options.lengths.max_k, longer))


def _only_ids_below(vocab_size: int) -> Processor:
    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, vocab_size:] = -float("inf")
        return scores

    return processor
