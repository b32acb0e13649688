"""What a user holds: a target, the strategies that decode it faster, text in and text out."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args, overload

import torch

from quasar.errors import InvalidRequestError
from quasar.loop.checks import is_bindable
from quasar.loop.decode import reference_decode, speculate
from quasar.loop.decoding import Decoding, Parts, PlainDecoding
from quasar.loop.detokenize import IncrementalText
from quasar.loop.processing import Processing
from quasar.loop.stop_strings import TextStream
from quasar.loop.stopping import Criterion, Stopping
from quasar.options import choice
from quasar.pipeline.generation import Generation
from quasar.pipeline.guarantees import check_exact, guarantee_of, guarantee_of_reference
from quasar.pipeline.plan import Choices, DrafterLike, Plan, spec_of
from quasar.pipeline.prompts import Prompt, checked_prompt_ids, encode, encode_prompt
from quasar.pipeline.request import Request, Settings
from quasar.protocols import AcceptancePolicy, Drafter, Verifier
from quasar.registry.registry import default_registry
from quasar.types import ExactTo, GenerationResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
    from typing_extensions import Unpack

PromptIds = Sequence[int] | torch.Tensor


class Pipeline:
    """A target behind a verifier, a drafter and a policy; shared by any number of generations, also interleaved ones.

    Args:
        verifier: The target.
        tokenizer: A transformers tokenizer, or ``None`` if only token ids go in and out.
        drafter: Spec string, Drafter, or a function ``(token_ids, k) -> token ids``.
        policy: Spec string or AcceptancePolicy; ``"auto"`` is coupled, hence greedy at temperature 0.
        exact_to: What the verifier's target is, for the guarantee: ``"quantized"`` or ``"full"``. ``"target"`` claims
            nothing of the model behind it, only that the output is what the verifier alone would say.
        target_name: The target for a reader of the guarantee.
        eos_token_ids: Where the model ends its output, unless a call says otherwise.
    """

    def __init__(
        self,
        verifier: Verifier,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        drafter: DrafterLike = "ngram",
        policy: str | AcceptancePolicy = "auto",
        exact_to: ExactTo = "target",
        target_name: str = "the verifier's target",
        eos_token_ids: int | Iterable[int] | None = None,
    ) -> None:
        choice(*get_args(ExactTo)).check("exact_to", exact_to)
        registry = default_registry()
        self.verifier: Verifier = registry.build("verifier", verifier)
        self.drafter: Drafter = registry.build("drafter", drafter)
        self.policy: AcceptancePolicy = registry.build("policy", "coupled" if policy == "auto" else policy)
        self.tokenizer = tokenizer
        self.exact_to: ExactTo = exact_to
        check_exact(exact_to, self.verifier)
        self.description: dict[str, Any] = {
            "exact_to": exact_to,
            "invariance": self.verifier.invariance,
            "approximations": list(self.verifier.approximations),
        }
        self._target_name = target_name
        self._eos_token_ids = eos_token_ids

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **choices: Unpack[Choices]
    ) -> Pipeline:
        """Quantize a model that is loaded already (a copy; the model is left as it is) and build a pipeline on it.

        Choices are as in :class:`quasar.pipeline.plan.Plan`.

        Raises:
            InvalidRequestError: An option or combination that cannot be honoured.
            UnsupportedModelError: The model cannot be quantized so, or cannot be rolled back.
        """
        from transformers import PreTrainedModel

        plan = Plan.of(choices)
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequestError(
                f"from_model takes a transformers model that is loaded, got {model!r:.40}; from_pretrained loads one"
            )
        return cls._from_plan(plan, model, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        **choices: Unpack[Choices],
    ) -> Pipeline:
        """Load a model (see :func:`quasar.checkpoints.models.load_model`), quantize it and build a pipeline on it.

        Choices are as in :class:`quasar.pipeline.plan.Plan`. What can be refused is refused before the model is loaded.

        Raises:
            ModelNotFoundError: Nothing is found under ``name``.
            QuasarError: As for :meth:`from_model`.
        """
        plan = Plan.of(choices)
        if not isinstance(name, str):
            given = " ".join(repr(name).split())
            raise InvalidRequestError(
                f"from_pretrained takes the name of a model, got {given:.40}; from_model takes one that is loaded"
            )
        from quasar.checkpoints.models import load_model  # imports transformers, which takes long

        loaded = load_model(name, dtype=dtype, device=device)
        pipeline = cls._from_plan(plan, loaded.model, loaded.tokenizer)
        pipeline.description = {"model": name, **pipeline.description}
        return pipeline

    @classmethod
    def _from_plan(cls, plan: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Pipeline:
        plan = plan.fitted_to(model)
        made = plan.assemble(model, tokenizer)
        verifier = made.verifier
        pipeline = cls(
            verifier,
            tokenizer,
            drafter=made.drafter,
            policy=plan.policy,
            exact_to=plan.exact_to_of(verifier),
            target_name=plan.target_name,
            eos_token_ids=_eos_of(model, tokenizer),
        )
        pipeline.description |= plan.describe(model, made.report)
        if describe := getattr(verifier, "describe", None):
            pipeline.description["verification"] = dict(describe())
        return pipeline

    def with_drafter(self, drafter: DrafterLike) -> Pipeline:
        """The same target, decoded with another drafter, and with the same claim; all weights are shared.

        Args:
            drafter: Spec string, Drafter, or a function ``(token_ids, k) -> token ids``. It drafts for the target: a
                cascade that drafted before is replaced whole.

        Raises:
            InvalidRequestError: The drafter has a method ``bind``, and the model it would be bound to is not kept.
        """
        built: Drafter = default_registry().build("drafter", drafter)
        if is_bindable(built):
            raise InvalidRequestError(
                f"{type(built).__name__} is bound to the model as it was given, which a pipeline does not keep; "
                "give it to Pipeline.from_model or from_pretrained"
            )
        return self._with("drafter", drafter, drafter=built)

    def with_policy(self, policy: str | AcceptancePolicy) -> Pipeline:
        """The same target, drafted for as before, with another policy; all weights are shared."""
        name = "coupled" if policy == "auto" else policy
        return self._with("policy", policy, policy=default_registry().build("policy", name))

    def _with(self, kind: str, given: object, **changed: Any) -> Pipeline:
        pipeline = copy.copy(self)
        vars(pipeline).update(changed, description={**self.description, kind: spec_of(given)})
        return pipeline

    @overload
    def generate(
        self, prompt: Prompt, *, num_return_sequences: None = None, **settings: Unpack[Settings]
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: Prompt, *, num_return_sequences: int, **settings: Unpack[Settings]
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompt: Prompt, *, num_return_sequences: int | None = None, **settings: Unpack[Settings]
    ) -> GenerationResult | list[GenerationResult]:
        """Answer a text or chat messages; settings as in :class:`quasar.pipeline.request.Request`.

        Args:
            num_return_sequences: Return a list of that many results. Result i is what ``seed + i`` gives by itself.
        """
        request = Request.of(settings)
        prompt_ids = encode_prompt(self.tokenizer, prompt, request.chat_format)
        return self._run(prompt_ids, request, num_return_sequences)

    @overload
    def generate_ids(
        self, prompt_ids: PromptIds, *, num_return_sequences: None = None, **settings: Unpack[Settings]
    ) -> GenerationResult: ...

    @overload
    def generate_ids(
        self, prompt_ids: PromptIds, *, num_return_sequences: int, **settings: Unpack[Settings]
    ) -> list[GenerationResult]: ...

    def generate_ids(
        self, prompt_ids: PromptIds, *, num_return_sequences: int | None = None, **settings: Unpack[Settings]
    ) -> GenerationResult | list[GenerationResult]:
        """Continue token ids: a sequence, or an integer tensor ``[T]`` or ``[1, T]``; else as :meth:`generate`."""
        return self._run(checked_prompt_ids(prompt_ids), Request.of(settings), num_return_sequences)

    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Generation:
        """An iterator of chunks; after its end its ``result`` is what :meth:`generate` would have returned."""
        request = Request.of(settings)
        return self._start(encode_prompt(self.tokenizer, prompt, request.chat_format), request)

    def reference(self, prompt: Prompt | PromptIds, **settings: Unpack[Settings]) -> GenerationResult:
        """The same with the target alone, one token a step; takes token ids as well."""
        request = Request.of(settings)
        return self._start(encode(self.tokenizer, prompt, request.chat_format), request, speculative=False).run()

    def _run(
        self, prompt_ids: list[int], request: Request, num_return_sequences: int | None
    ) -> GenerationResult | list[GenerationResult]:
        if num_return_sequences is None:
            return self._start(prompt_ids, request).run()
        return [self._start(prompt_ids, one).run() for one in request.several(num_return_sequences)]

    def _start(self, prompt_ids: list[int], request: Request, *, speculative: bool = True) -> Generation:
        self._check_fits(prompt_ids, request.max_new_tokens)
        text = None
        if self.tokenizer is not None:
            text = IncrementalText(self.tokenizer, skip_special_tokens=request.skip_special_tokens)
        parts = self._parts_of(prompt_ids, request, text)
        one: PlainDecoding
        if speculative:
            request.check_policy(self.policy)
            one = decoding = Decoding(prompt_ids, drafter=self.drafter, policy=self.policy, **parts)
            steps = speculate(decoding)
            guarantee = guarantee_of(self.verifier, self.policy, self.exact_to, self._target_name, request.sampling)
        else:
            one = PlainDecoding(prompt_ids, **parts)
            steps = reference_decode(one)
            guarantee = guarantee_of_reference(self.verifier, self.exact_to, self._target_name)
        stream = None if text is None else TextStream(text, request.stop)
        return Generation(steps, one, text=stream, guarantee=guarantee, logprobs=request.logprobs)

    def _parts_of(self, prompt_ids: list[int], request: Request, text: IncrementalText | None) -> Parts:
        eos_token_ids = self._eos_token_ids if request.eos_token_id == "model" else request.eos_token_id
        stopping = Stopping(
            request.max_new_tokens,
            eos_token_ids=eos_token_ids,
            stop=request.stop,
            criteria=[_as_criterion(criterion, prompt_ids) for criterion in request.stopping_criteria],
            text=text,
        )
        processing = Processing(prompt_ids, request.processors(len(prompt_ids), eos_token_ids))
        return Parts(verifier=self.verifier, sampling=request.sampling, stopping=stopping, processing=processing)

    def _check_fits(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        limit = self.verifier.max_length
        if limit is not None and len(prompt_ids) + max_new_tokens > limit:
            room = limit - len(prompt_ids)
            raise InvalidRequestError(
                f"the prompt has {len(prompt_ids)} tokens and max_new_tokens={max_new_tokens}, but the model's context "
                f"is {limit}{_why_no_more(self.verifier)}; "
                + (f"at most {room} new tokens fit" if room > 0 else "shorten the prompt")
            )


def _why_no_more(verifier: Verifier) -> str:
    """Why a verifier takes no longer sequences, in parentheses; nothing where that is the model's own end."""
    describe = getattr(verifier, "describe", None)
    reason = describe().get("context_reason") if describe else None
    return f" ({reason})" if reason else ""


def _eos_of(model: PreTrainedModel, tokenizer: Any) -> int | list[int] | None:
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        if (token_ids := getattr(holder, "eos_token_id", None)) is not None:
            return token_ids  # type: ignore[no-any-return]
    return None


def _as_criterion(criterion: Criterion | StoppingCriteria, prompt_ids: list[int]) -> Criterion:
    from transformers import StoppingCriteria

    if not isinstance(criterion, StoppingCriteria):
        return criterion

    def adapted(new_ids: Sequence[int]) -> bool:
        met = criterion(torch.tensor([[*prompt_ids, *new_ids]], device="cpu"), None)
        return bool(torch.as_tensor(met).all())

    return adapted
