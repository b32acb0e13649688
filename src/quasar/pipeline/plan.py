"""Which strategies a pipeline is made of: chosen, checked and built before any model is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import attrs
import torch
from torch import nn

from quasar.drafters.nested import CascadeDrafter
from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.loop.checks import bind_drafter, enough_prompts, is_bindable, quantize
from quasar.options import choice, flag
from quasar.pipeline.calibration import own_prompts, prompts_from
from quasar.pipeline.prompts import encode_prompt
from quasar.protocols import AcceptancePolicy, Drafter, Quantizer, Verifier
from quasar.quantizers.none import NoQuantizer
from quasar.registry.registry import AUTO, default_registry
from quasar.timings import timed
from quasar.types import ExactTo, Quantized
from quasar.weights.layers import check_loaded
from quasar.weights.linear import quantized_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DrafterLike = str | Drafter | Callable[[list[int], int], Iterable[int]]
VerifierLike = str | Callable[[Any], Verifier]
Calibration = str | Path | Sequence[str] | None

_CALIBRATION_TOKENS = 512


class Choices(TypedDict, total=False):
    """Keyword arguments of ``Pipeline.from_pretrained`` and ``from_model``; see :class:`Plan`."""

    drafter: DrafterLike
    quantizer: str | Quantizer
    policy: str | AcceptancePolicy
    exact_to: ExactTo
    verifier: VerifierLike
    calibration: Calibration
    strict: bool


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """The choices of a pipeline. A strategy is a spec string (``"name:option=value,…"``) or, but for the verifier,
    an object.

    Args:
        drafter: Also a function ``(token_ids, k) -> token ids``.
        quantizer: What makes the target out of the model; ``"none"``: the target is the model as it was given.
            ``"auto"``: ``w8a8``, and ``none`` for a model that comes quantized.
        policy: ``"auto"`` is coupled, hence greedy at temperature 0.
        exact_to: What the output must equal. ``"quantized"``: what the quantized model would produce alone;
            ``"full"``: what the model as it was given would; the quantized one then drafts for it.
        verifier: Spec string, or a function from the quantized model to a Verifier. ``"auto"``: ``native`` where that
            plug-in is installed and the model is on a CPU, else ``causal_lm``.
        calibration: Prompts, or a file of them (see :func:`quasar.pipeline.calibration.prompts_from`); ``None``:
            Quasar's own few. They are tokenized as prompts are, chat template included.
        strict: The target's logits must be bit-identical at any width, or building the pipeline fails with the reason.
    """

    drafter: Drafter
    quantizer: Quantizer
    policy: AcceptancePolicy
    exact_to: ExactTo
    verifier: VerifierLike
    calibration: Sequence[str]
    strict: bool
    specs: Mapping[str, str]
    choices: Choices

    @classmethod
    def of(cls, choices: Choices) -> Plan:
        """Build all strategies but the verifier.

        Raises:
            InvalidRequestError: An unknown choice, option, name or combination.
            PluginError: A strategy that does not fit its protocol.
        """
        known = list(Choices.__annotations__)
        if unknown := [name for name in choices if name not in known]:
            raise InvalidRequestError(f"there is no choice {unknown[0]!r}; choices: {', '.join(known)}")
        drafter = choices.get("drafter", "ngram")
        quantizer = choices.get("quantizer", AUTO)
        quantizer = "w8a8" if quantizer == AUTO else quantizer
        policy = choices.get("policy", "auto")
        verifier = choices.get("verifier", AUTO)
        registry = default_registry()
        built: Quantizer = registry.build("quantizer", quantizer)
        built_drafter: Drafter = registry.build("drafter", drafter)
        registry.check_verifier(verifier)
        n_own = None if is_bindable(built_drafter) else enough_prompts(built)
        exact_to = _checked_exact_to(choices.get("exact_to", "quantized"), built)
        if exact_to == "full" and not isinstance(built, NoQuantizer):
            built_drafter = CascadeDrafter(built_drafter, built, verifier)
        named = {"drafter": drafter, "quantizer": quantizer, "policy": policy, "verifier": verifier}
        return cls(
            drafter=built_drafter,
            quantizer=built,
            policy=registry.build("policy", "coupled" if policy == "auto" else policy),
            exact_to=exact_to,
            verifier=verifier,
            calibration=_prompts(choices.get("calibration"), n_own),
            strict=flag().accepted("strict", choices.get("strict", False)),
            specs={kind: spec_of(strategy) for kind, strategy in named.items()},
            choices=choices,
        )

    def fitted_to(self, model: nn.Module) -> Plan:
        """This plan; for a model that comes quantized, and no quantizer asked for, one that leaves it as it is.

        Raises:
            InvalidRequestError: ``exact_to="full"`` of a model whose full weights are not there.
        """
        asked = self.choices.get("quantizer", AUTO) != AUTO and self.quantizes
        if asked or not quantized_layers(model):
            return self
        if self.choices.get("exact_to") == "full":
            raise InvalidRequestError(
                "exact_to='full' needs the full weights, and this model comes quantized; give the full model"
            )
        return attrs.evolve(Plan.of({**self.choices, "quantizer": "none"}), exact_to="quantized")

    def exact_to_of(self, verifier: Verifier) -> ExactTo:
        """What the output equals, now that the verifier is there.

        A full model that a verifier approximates is no longer the full model, unless that was asked for: then
        building the pipeline fails.
        """
        asked = self.choices.get("exact_to") == "full"
        return "quantized" if verifier.approximations and not asked else self.exact_to

    @property
    def target_name(self) -> str:
        """The target, for a reader."""
        as_given = self.exact_to == "full" or not self.quantizes
        return "the model as it was given" if as_given else f"the model quantized by {self.specs['quantizer']}"

    @property
    def quantizes(self) -> bool:
        """Whether there is a quantized model at all."""
        return not isinstance(self.quantizer, NoQuantizer)

    def assemble(self, model: PreTrainedModel, tokenizer: Any) -> Assembled:
        """Make the target of the model, and bind what drafts for it.

        Called on a plan that is :meth:`fitted_to` the model.
        """
        check_loaded(model)
        calibration = self.calibration_for(model, tokenizer)
        drafter = bind_drafter(self.drafter, model, tokenizer, calibration)  # first, for it may refuse the model
        if self.exact_to == "full":
            made = Quantized(model, getattr(drafter, "report", None) or self.quantizer.describe())
        else:
            with timed("quantize"):
                made = quantize(self.quantizer, model, calibration)
        return Assembled(self.verifier_of(made.model), drafter, made.report)

    def calibration_for(self, model: PreTrainedModel, tokenizer: Any) -> list[torch.Tensor] | None:
        """``[1, T]`` token ids of each calibration prompt; ``None`` where there is no use or no tokenizer for them."""
        if tokenizer is None or not (self.quantizes or is_bindable(self.drafter)):
            return None
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _CALIBRATION_TOKENS
        most = min(context, _CALIBRATION_TOKENS)
        encoded = (encode_prompt(tokenizer, prompt)[:most] for prompt in self.calibration)
        return [torch.tensor([token_ids], device=model.device) for token_ids in encoded]

    @timed("prepare")
    def verifier_of(self, model: Any) -> Verifier:
        """The verifier over the target."""
        verifier: Verifier = default_registry().build_verifier(self.verifier, model)
        return strictly(verifier) if self.strict else verifier

    def describe(self, model: PreTrainedModel, report: Mapping[str, Any]) -> dict[str, Any]:
        """For a reader and for JSON; without the single layers.

        Args:
            report: What the quantizer made of the model.
        """
        quantization = {key: value for key, value in report.items() if key != "layers"}
        verifier = spec_of(default_registry().resolve_verifier(self.verifier, model))
        return {
            **self.specs,
            "verifier": verifier,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "quantization": quantization,
        }


@attrs.frozen(eq=False)
class Assembled:
    """What a plan makes of a model: the target behind its verifier, what drafts for it, and the quantizer's report."""

    verifier: Verifier
    drafter: Drafter
    report: Mapping[str, Any]


def strictly(verifier: Verifier) -> Verifier:
    """A verifier whose logits are bit-identical at any width: this one, or what its method ``strict`` makes of it.

    Raises:
        UnsupportedModelError: There is no such thing.
    """
    if verifier.invariance == "bitwise":
        return verifier
    make = getattr(verifier, "strict", None)
    if make is None:
        raise UnsupportedModelError(
            f"strict: {type(verifier).__name__} declares invariance {verifier.invariance!r} and has no method strict() "
            "that makes it bitwise"
        )
    return make()  # type: ignore[no-any-return]


def _checked_exact_to(exact_to: str, quantizer: Quantizer) -> ExactTo:
    choice("quantized", "full").check("exact_to", exact_to)
    return "full" if exact_to == "full" or isinstance(quantizer, NoQuantizer) else "quantized"


def _prompts(calibration: Calibration, n_own: int | None) -> Sequence[str]:
    if calibration is None:
        return own_prompts()[:n_own]
    if isinstance(calibration, str | Path):
        return prompts_from(calibration)
    if not isinstance(calibration, Sequence) or not all(isinstance(prompt, str) for prompt in calibration):
        raise InvalidRequestError(f"calibration={calibration!r:.60}; give a file, a list of prompts, or None")
    return calibration


def spec_of(strategy: object) -> str:
    """How a strategy was given: its spec string, or the name of what was passed."""
    return strategy if isinstance(strategy, str) else getattr(strategy, "__name__", type(strategy).__name__)
