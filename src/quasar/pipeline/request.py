"""The settings of one generation, checked before anything runs. Nothing heavy is imported for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs

from quasar.errors import InvalidRequestError
from quasar.loop.stop_strings import checked_stops
from quasar.loop.stopping import Criterion, as_token_ids
from quasar.options import Expectation, did_you_mean, flag, integer, number, optional, plain_number
from quasar.pipeline.prompts import ChatFormat

if TYPE_CHECKING:
    from transformers import StoppingCriteria

    from quasar.loop.processing import Processor
    from quasar.loop.sampling import Sampling
    from quasar.protocols import AcceptancePolicy


class Settings(TypedDict, total=False):
    """Keyword arguments of the calls of a Pipeline; see :class:`Request`."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    min_new_tokens: int | None
    logits_processors: Sequence[Processor]
    logprobs: int | None
    stop: str | Sequence[str] | None
    seed: int
    stopping_criteria: Criterion | StoppingCriteria | Sequence[Criterion | StoppingCriteria] | None
    eos_token_id: int | Sequence[int] | Literal["model"] | None
    skip_special_tokens: bool
    raw: bool
    tools: Sequence[Any] | None
    template_options: Mapping[str, Any]


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """Several values, one alone, or none, as a tuple."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, Iterable) and not isinstance(values, str) else (values,)


def _as_stops(stop: Any) -> tuple[str, ...]:
    return checked_stops(_as_tuple(stop))


def _as_ids(token_ids: Any) -> Any:
    is_said = token_ids is None or (isinstance(token_ids, str) and token_ids == "model")
    return token_ids if is_said else as_token_ids(token_ids)


def _check_criteria(request: Any, attribute: Any, criteria: tuple[Any, ...]) -> None:
    for criterion in criteria:
        if not callable(criterion):
            raise InvalidRequestError(
                f"stopping_criteria: {criterion!r} is not callable; give functions of the list of new tokens, or "
                "transformers' StoppingCriteria"
            )


def _number(default: float | None, expectation: Expectation) -> Any:
    return attrs.field(default=default, converter=plain_number, validator=expectation)


@attrs.frozen(kw_only=True)
class Request:
    """What one generation was asked for.

    Args:
        max_new_tokens: Budget, at least 1; prompt and budget together must fit the model's context.
        temperature: Divides the logits; 0 is greedy.
        top_k: Sample from the k most probable tokens; more than the vocabulary cuts nothing.
        top_p: Sample from the most probable tokens that together reach p, after ``top_k``.
        min_p: Sample from tokens at least this times as probable as the most probable, after ``top_p``.
        repetition_penalty: Divides the positive logits, and multiplies the negative ones, of tokens that occurred in
            prompt or output (Keskar et al. 2019, arXiv 1909.05858).
        no_repeat_ngram_size: No n-gram of this length occurs twice in prompt and output.
        min_new_tokens: No EOS before so many new tokens.
        logits_processors: Functions of ``(input_ids [1, T], scores [1, V])`` such as transformers' LogitsProcessor,
            applied in order at every position, after the three above and before the temperature. An object with a state
            is copied by position; a plain function must be pure.
        logprobs: How many of the most probable tokens to report for each new token, beside the token itself: natural
            logarithms of the softmax of the processed logits, before temperature and cuts. ``None``: report nothing.
        stop: Stop string, several or none, looked for in the new text. The text ends before the first that occurs; the
            tokens end with the one that completed it.
        seed: Seed of the noise of sampling; greedy output does not depend on it.
        stopping_criteria: Functions of the list of new tokens, asked after each one and true to stop; or transformers'
            ``StoppingCriteria``, which get prompt and new tokens as a ``[1, T]`` tensor. One, several or none.
        eos_token_id: One id, several (a sequence, an array or a tensor), or ``None`` for none. ``"model"``: what the
            model's generation configuration says; where that says nothing, its configuration; then its tokenizer.
        skip_special_tokens: Leave special tokens out of the text. A stop string may name one all the same.
        raw: Take a text as it is, without the model's chat template.
        tools: Functions that the chat template offers to the model: JSON schemas, or functions with docstrings.
        template_options: Variables for the chat template, such as ``{"enable_thinking": False}``.
    """

    max_new_tokens: int = _number(128, integer(at_least=1))
    temperature: float = _number(0.0, number(at_least=0))
    top_k: int | None = _number(None, optional(integer(at_least=1)))
    top_p: float | None = _number(None, optional(number(above=0, at_most=1)))
    min_p: float | None = _number(None, optional(number(at_least=0, at_most=1)))
    repetition_penalty: float | None = _number(None, optional(number(above=0)))
    no_repeat_ngram_size: int | None = _number(None, optional(integer(at_least=1)))
    min_new_tokens: int | None = _number(None, optional(integer(at_least=0)))
    logits_processors: tuple[Processor, ...] = attrs.field(default=(), converter=_as_tuple)
    logprobs: int | None = _number(None, optional(integer(at_least=0)))
    stop: tuple[str, ...] = attrs.field(default=(), converter=_as_stops)
    seed: int = _number(0, integer())
    stopping_criteria: tuple[Criterion | StoppingCriteria, ...] = attrs.field(
        default=(), converter=_as_tuple, validator=_check_criteria
    )
    eos_token_id: int | tuple[int, ...] | Literal["model"] | None = attrs.field(default="model", converter=_as_ids)
    skip_special_tokens: bool = attrs.field(default=True, validator=flag())
    raw: bool = attrs.field(default=False, validator=flag())
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def chat_format(self) -> ChatFormat:
        """How the prompt becomes text."""
        return ChatFormat(raw=self.raw, tools=self.tools, options=self.template_options)

    @property
    def sampling(self) -> Sampling:
        """How a token is chosen, seen from position 0."""
        from quasar.loop.sampling import Sampling

        return Sampling(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
        )

    def processors(self, prompt_length: int, eos_token_ids: Any) -> list[Processor]:
        """All logits processors of a generation, in the order of transformers' own ``generate``."""
        from quasar.loop.penalties import MinNewTokens, NoRepeatNgram, RepetitionPenalty

        built: list[Processor] = []
        if self.repetition_penalty is not None:
            built.append(RepetitionPenalty(float(self.repetition_penalty)))
        if self.no_repeat_ngram_size is not None:
            built.append(NoRepeatNgram(self.no_repeat_ngram_size))
        if self.min_new_tokens is not None and (eos := list(as_token_ids(eos_token_ids))):
            built.append(MinNewTokens(prompt_length, self.min_new_tokens, eos))
        return [*built, *self.logits_processors]

    def check_policy(self, policy: AcceptancePolicy) -> None:
        """Let a policy that cannot honour every sampling refuse this one.

        Raises:
            InvalidRequestError: It refuses.
        """
        if (check := getattr(policy, "check_sampling", None)) is not None:
            check(self.sampling)

    def several(self, n: int) -> list[Request]:
        """The same request with n seeds, counted from its own.

        Raises:
            InvalidRequestError: n is no positive integer, or all would give the same greedy output.
        """
        optional(integer(at_least=1)).check("num_return_sequences", n)
        if n > 1 and self.temperature == 0:
            raise InvalidRequestError(
                f"num_return_sequences={n} at temperature 0 would return one output {n} times; give a temperature"
            )
        return [attrs.evolve(self, seed=self.seed + i) for i in range(n)]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Request:
        """Check the keyword arguments of a call.

        Raises:
            InvalidRequestError: An unknown setting, or a value out of range.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in settings:
            if name not in known:
                hint = did_you_mean(name, known)
                raise InvalidRequestError(f"there is no setting {name!r}.{hint} Settings: {', '.join(known)}")
        return cls(**settings)

    def __attrs_post_init__(self) -> None:
        self.chat_format.check()
        if self.min_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise InvalidRequestError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}"
            )
