"""Any transformers causal LM as the target, in full precision or with quantized modules inside."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.loop.prefix import common_prefix_length
from quasar.options import flag
from quasar.protocols import Invariance
from quasar.types import Draft, Verification
from quasar.verifiers.attention import attending_by_rows, use_row_attention
from quasar.verifiers.cache import check_can_roll_back, new_cache, roll_back
from quasar.verifiers.fixed_width import use_fixed_blocks
from quasar.verifiers.invariance import WIDTHS, measure_invariance
from quasar.weights.layers import structure_copy
from quasar.weights.linear import QuantizedLinear


class CausalLMVerifier:
    """Verifies k tokens with one forward of width k+1 over a cache that is rolled back afterwards.

    Args:
        model: In evaluation mode. Its tensors are shared, the model itself is not changed.
        strict: Make the logits bit-identical at any width, and try that they are.

    Raises:
        UnsupportedModelError: The model cannot be rolled back (recurrent, hybrid, encoder-decoder), has no output
            head, or cannot be made strict.
    """

    speed = 0

    @staticmethod
    def refuses(model: object) -> str | None:
        """It is what runs a model that nothing faster runs; whether it can shows when it is built."""
        return None

    @staticmethod
    def check_options(*, strict: bool = False) -> None:
        """Refuse what no model could be run with."""
        flag().check("strict", strict, who="causal_lm")

    def __init__(self, model: PreTrainedModel, *, strict: bool = False) -> None:
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequestError(f"the model is {model!r:.40}; give a transformers causal LM (…ForCausalLM)")
        self.check_options(strict=strict)
        check_can_roll_back(model)
        if model.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no output head; give the model with it (…ForCausalLM)"
            )
        self._given = model
        self.model: PreTrainedModel = structure_copy(model).eval()
        attends_by_rows = use_row_attention(self.model)
        config = model.config.get_text_config()
        self.vocab_size: int = config.vocab_size
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self.invariance: Invariance = "argmax" if attends_by_rows and _keeps_rounding_small(self.model) else "none"
        use_fixed_blocks(self.model, only_where_faster=not strict)
        if strict:
            self.invariance = "bitwise"
            self._try_strictness()

    def strict(self) -> CausalLMVerifier:
        """The same target with logits that are bit-identical at any width.

        Raises:
            UnsupportedModelError: They are not: tried at widths 1 to 16, and the message says where they differ.
        """
        return CausalLMVerifier(self._given, strict=True)

    def _try_strictness(self) -> None:
        generator = torch.Generator().manual_seed(0)
        length = min(2 * max(WIDTHS) + 8, self.max_length or 10**9)
        token_ids = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        report = measure_invariance(self, token_ids, begin=max(1, length - max(WIDTHS)))
        if not report.holds:
            width = next(width for width, found in report.widths.items() if found.max_abs_diff > 0)
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot be decoded strictly: at {width} positions a forward its logits "
                f"differ from those at one by {report.widths[width].max_abs_diff:.2g}"
            )

    def start(self, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> CausalLMSession:
        unknown = needs - {"logits", "hidden_states"}
        if unknown:
            raise UnsupportedModelError(f"the drafter needs {sorted(unknown)}; causal_lm has logits and hidden_states")
        if not prompt_ids or not all(0 <= token_id < self.vocab_size for token_id in prompt_ids):
            what = "is empty" if not prompt_ids else f"has ids outside 0…{self.vocab_size - 1}"
            raise InvalidRequestError(f"the prompt {what}; give at least one token of the model's vocabulary")
        return CausalLMSession(self.model, prompt_ids, "hidden_states" in needs)


class CausalLMSession:
    """One sequence: its committed tokens, and a cache of all of them but the last."""

    def __init__(self, model: PreTrainedModel, prompt_ids: Sequence[int], with_hidden_states: bool) -> None:
        self._model = model
        self._with_hidden_states = with_hidden_states
        self._cache = new_cache()
        self._token_ids: list[int] = []
        self.restart(prompt_ids)

    @property
    def cached_length(self) -> int:
        """Positions in the cache; between steps one less than the committed tokens, after a restart maybe fewer."""
        return self._cache.get_seq_length()

    def verify(self, draft: Draft) -> Verification:
        roll_back(self._cache, len(self._token_ids) - 1)  # in case the last draft was verified but never judged
        behind = self._token_ids[self.cached_length :]  # the last token alone, unless the session was restarted
        with attending_by_rows():
            return self._forward((*behind, *draft.token_ids), n_logits=len(draft) + 1)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        roll_back(self._cache, len(self._token_ids) - 1)

    def restart(self, token_ids: Sequence[int]) -> None:
        """Become the session of ``token_ids``, keeping what is cached of a common beginning.

        What a common beginning lacks is computed with the next draft, in one forward.
        """
        cached = min(common_prefix_length(self._token_ids, token_ids), self.cached_length, len(token_ids) - 1)
        roll_back(self._cache, cached)
        self._token_ids = list(token_ids)
        # A prompt gets a forward of its own, so that its keys and values are the same whatever is drafted.
        if cached == 0 and len(token_ids) > 1:
            self._forward(token_ids[:-1], n_logits=1)

    @torch.no_grad()
    def _forward(self, token_ids: Sequence[int], *, n_logits: int) -> Verification:
        # No attention mask is passed: nothing is padded, and the model then makes the causal mask from the length of
        # the cache, aligned to its end (bottom-right).
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self._model.device),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=n_logits,
            output_hidden_states=self._with_hidden_states,
        )
        hidden = output.hidden_states[-1][0, -n_logits:] if self._with_hidden_states else None
        return Verification(output.logits[0], hidden)


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
