"""Any transformers causal LM as the target, in full precision or with quantized modules inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.options import flag, integer, optional
from quasar.protocols import Invariance
from quasar.verifiers.attention import use_row_attention
from quasar.verifiers.cache import check_can_roll_back
from quasar.verifiers.causal_lm_session import CausalLMSession
from quasar.verifiers.causality import check_causal
from quasar.verifiers.context import chosen_length, switch_of
from quasar.verifiers.features import hidden_states_of
from quasar.verifiers.fixed_width import use_fixed_panels
from quasar.verifiers.invariance import WIDTHS, measure_invariance
from quasar.verifiers.session import checked_prompt
from quasar.verifiers.switching import SwitchingSession, use_switched_embeddings
from quasar.weights.layers import check_loaded, structure_copy
from quasar.weights.linear import QuantizedLinear


class CausalLMVerifier:
    """Verifies k tokens with one forward of width k+1 over a cache that is rolled back afterwards.

    A forward of more than 16 positions is split: those are the widths that strictness is tried at. A model whose rotary
    embedding switches at some length runs as :mod:`quasar.verifiers.switching` says, or up to that length only.

    Args:
        model: In evaluation mode. Its tensors are shared, the model itself is not changed.
        strict: Make the logits bit-identical at any width, and try that they are.
        max_length: Longest sequence in tokens; ``None``: what the configuration declares, scaling of the rotary
            embedding included.

    Raises:
        InvalidRequestError: ``max_length`` is more than the model has positions for, or its weights are not loaded.
        UnsupportedModelError: The model is no causal LM, cannot be rolled back (recurrent, hybrid, encoder-decoder),
            has no output head, or cannot be made strict.
    """

    speed = 0
    approximations: tuple[str, ...] = ()

    @staticmethod
    def refuses(model: object) -> str | None:
        """It is what runs a model that nothing faster runs; whether it can shows when it is built."""
        return None

    @staticmethod
    def check_options(*, strict: bool = False, max_length: int | None = None) -> None:
        """Refuse what no model could be run with."""
        flag().check("strict", strict, who="causal_lm")
        optional(integer(at_least=1)).check("max_length", max_length, who="causal_lm")

    def __init__(self, model: PreTrainedModel, *, strict: bool = False, max_length: int | None = None) -> None:
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequestError(f"the model is {model!r:.40}; give a transformers causal LM (…ForCausalLM)")
        self.check_options(strict=strict, max_length=max_length)
        check_loaded(model)
        check_can_roll_back(model)
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no output head; give the model with it (…ForCausalLM)"
            )
        self._given = model
        self.model: PreTrainedModel = structure_copy(model).eval()
        attends_by_rows = use_row_attention(self.model)
        check_causal(self.model)
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.max_length: int | None = chosen_length(model, max_length)
        self._asked_length, self._reason = max_length, ""
        self._switch = self._keep_rows_apart()
        self.invariance: Invariance = "argmax" if attends_by_rows and _keeps_rounding_small(self.model) else "none"
        use_fixed_panels(self.model, only_where_faster=not strict)
        if strict:
            self.invariance = "bitwise"
            self._try_strictness()

    def strict(self) -> CausalLMVerifier:
        """The same target with logits that are bit-identical at any width.

        Raises:
            UnsupportedModelError: They are not: tried at widths 1 to 16, and the message says where they differ.
        """
        return CausalLMVerifier(self._given, strict=True, max_length=self._asked_length)

    def _keep_rows_apart(self) -> int | None:
        """Position from which on the rotary embedding is another one; where that cannot be had, the context ends."""
        found = switch_of(self.model, self.max_length)
        if found is None:
            return None
        length, kind = found
        if use_switched_embeddings(self.model, length):
            return length
        self.max_length = length
        self._reason = f"beyond {length} positions a rotary embedding of type {kind!r} would change earlier ones"
        return None

    def describe(self) -> Mapping[str, Any]:
        """What runs the model, and why its context is shorter than the model's, where it is."""
        reason = {"context_reason": self._reason} if self._reason else {}
        return {"engine": "transformers", "context": self.max_length, **reason}

    def _try_strictness(self) -> None:
        generator = torch.Generator().manual_seed(0)
        length = min(2 * max(WIDTHS) + 8, self.max_length or 10**9)
        token_ids = torch.randint(self.vocab_size, (length,), device="cpu", generator=generator).tolist()
        report = measure_invariance(self, token_ids, begin=max(1, length - max(WIDTHS)))
        if not report.holds:
            width = next(width for width, found in report.widths.items() if found.max_abs_diff > 0)
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be decoded strictly: at {width} positions a forward its logits "
                f"differ from those at one by {report.widths[width].max_abs_diff:.2g}"
            )

    def start(self, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> CausalLMSession:
        n_layers = self.model.config.get_text_config().num_hidden_layers
        hidden = hidden_states_of(needs, n_layers, "causal_lm") if needs else {}
        prompt = checked_prompt(prompt_ids, self.vocab_size, self.max_length, self._reason)
        if self._switch is None:
            return CausalLMSession(self.model, prompt, hidden)
        return SwitchingSession(self.model, prompt, hidden, self._switch)


def _keeps_rounding_small(model: PreTrainedModel) -> bool:
    # In 16 bits the width of a matrix product moves more than the last bits of a logit. So it does where a product in
    # floating point (experts, a router) is followed by one of integers: a last bit becomes a whole rounding step.
    return model.dtype in (torch.float32, torch.float64) and not _mixes_products(model)


def _mixes_products(model: PreTrainedModel) -> bool:
    modules = list(model.modules())
    executed = [module.activations for module in modules if isinstance(module, QuantizedLinear)]
    if not any(scheme == "int8_per_token" for scheme in executed):
        return False
    if "none" in executed:
        return True
    last = model.get_output_embeddings()
    floating = (module for module in modules if module is not last and not isinstance(module, nn.Embedding))
    return any(parameter.dim() >= 2 for module in floating for parameter in module.parameters(recurse=False))
