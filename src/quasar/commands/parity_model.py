"""What ``quasar parity`` measures: a model by its name, and the target that a plan makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quasar.checkpoints.models import load_model
from quasar.commands.parity import AgreementReport, greedy_text, measure_agreement
from quasar.errors import InvalidRequestError
from quasar.pipeline.calibration import own_prompts
from quasar.pipeline.plan import Plan
from quasar.pipeline.prompts import encode_prompt
from quasar.progress import track
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.verifiers.invariance import WIDTHS, InvarianceReport, measure_invariance
from quasar.weights.linear import quantized_layers


def measure_model(
    name: str,
    *,
    tokens: int,
    widths: Iterable[int] = WIDTHS,
    dtype: str | None = None,
    device: str | None = None,
    **choices: Any,
) -> tuple[InvarianceReport, AgreementReport]:
    """Load a model, make the target that ``choices`` describe, and measure it on the full model's own greedy text.

    Args:
        name: As for :func:`quasar.checkpoints.models.load_model`.
        tokens: How many tokens of text to make for each of Quasar's own prompts.
        widths: Positions a forward to compare at, none of them more than ``tokens``.
        choices: ``quantizer``, ``verifier``, ``calibration``, ``strict``; see :class:`quasar.pipeline.plan.Plan`.

    Raises:
        InvalidRequestError: The model comes quantized, so there is nothing to compare with.
    """
    plan = Plan.of(choices)  # type: ignore[arg-type]
    loaded = load_model(name, dtype=dtype, device=device)
    if quantized_layers(loaded.model):
        raise InvalidRequestError(f"{name} comes quantized; to measure what that changed takes the full model")
    verifier = plan.assemble(loaded.model, loaded.tokenizer).verifier
    full = CausalLMVerifier(loaded.model)
    prompts = [encode_prompt(loaded.tokenizer, prompt) for prompt in own_prompts()]
    texts = [(len(prompt), greedy_text(full, prompt, tokens)) for prompt in track(prompts, "making text")]
    begin, token_ids = texts[0]
    return measure_invariance(verifier, token_ids, begin, widths), measure_agreement(full, verifier, texts)
