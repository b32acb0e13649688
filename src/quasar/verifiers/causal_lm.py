"""Any transformers causal LM as the target, in full precision or with quantized modules inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.options import flag
from quasar.protocols import Invariance
from quasar.types import Verification
from quasar.verifiers.attention import attending_by_rows, use_row_attention
from quasar.verifiers.cache import check_can_roll_back, new_cache, roll_back
from quasar.verifiers.features import hidden_states_of
from quasar.verifiers.fixed_width import use_fixed_blocks
from quasar.verifiers.invariance import WIDTHS, measure_invariance
from quasar.verifiers.session import CachedSession, checked_prompt
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
    approximations: tuple[str, ...] = ()

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
        n_layers = self.model.config.get_text_config().num_hidden_layers
        hidden = hidden_states_of(needs, n_layers, "causal_lm") if needs else {}
        return CausalLMSession(self.model, checked_prompt(prompt_ids, self.vocab_size, self.max_length), hidden)


class CausalLMSession(CachedSession):
    """One sequence over a cache of transformers'.

    Args:
        model: Able to attend by rows, where its attention is replaceable.
        prompt_ids: See :class:`quasar.verifiers.session.CachedSession`.
        hidden: Index of the hidden states of each feature.
    """

    def __init__(self, model: PreTrainedModel, prompt_ids: Sequence[int], hidden: Mapping[str, int]) -> None:
        super().__init__(prompt_ids, frozenset(hidden))
        self._model, self._hidden = model, hidden
        self._cache = new_cache()

    @property
    def cached_length(self) -> int:
        return self._cache.get_seq_length()

    def _truncate(self, length: int) -> None:
        roll_back(self._cache, length)

    def _free(self) -> None:
        self._cache = new_cache()

    @torch.no_grad()
    def _forward(self, token_ids: Sequence[int], n_logits: int, *, as_prompt: bool) -> Verification:
        # No attention mask is passed: nothing is padded, and the model then makes the causal mask from the length of
        # the cache, aligned to its end (bottom-right).
        with nullcontext() if as_prompt else attending_by_rows():
            output = self._model(
                input_ids=torch.tensor([token_ids], dtype=torch.int64, device=self._model.device),
                cache=self._cache,
                use_cache=True,
                logits_to_keep=max(1, n_logits),
                output_hidden_states=bool(self._hidden),
            )
        n_rows = n_logits or len(token_ids)
        features = {name: output.hidden_states[index][0, -n_rows:] for name, index in self._hidden.items()}
        return Verification(output.logits[0], features)


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
