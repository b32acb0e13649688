"""The verifier ``native``: a whole decoder forward in one call of compiled code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.options import choice, integer, optional
from quasar.protocols import Invariance, Verifier, VerifySession
from quasar.verifiers.cache import check_can_roll_back
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.verifiers.features import hidden_states_of
from quasar.verifiers.session import checked_prompt
from quasar.weights.layers import check_loaded
from quasar_native import _native
from quasar_native.architecture import Architecture
from quasar_native.kernel import checked_instructions, checked_threads, pool_of
from quasar_native.session import NativeSession
from quasar_native.trial import check_agrees


class NativeVerifier:
    """Runs Llama, SmolLM, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3, quantized or not, on the compiled engine.

    A row of logits has the same bits at any width and any number of threads. Any other architecture is run by
    transformers, as ``causal_lm`` does, with whatever kernels its layers have; ``describe()`` says so and why.

    Args:
        model: A transformers causal LM on the CPU. Its embedding is shared, other weights are packed copies.
        threads: How many work on a forward; ``None``: as many as torch uses now.
        cache: What keys and values are stored in: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        instructions: As for :class:`quasar_native.kernel.NativeKernel`.
        max_length: Longest sequence in tokens; ``None``: what the configuration declares, scaling of the rotary
            embedding included.

    Raises:
        InvalidRequestError: An option that cannot be honoured, or a model whose weights are not loaded.
        NumericalError: The model's logits are not finite.
        UnsupportedModelError: transformers cannot run the model as a verifier either.
    """

    speed = 10

    @staticmethod
    def refuses(model: PreTrainedModel) -> str | None:
        """Why it should not run ``model``; ``None`` if it should, with the engine or by falling back."""
        return None if model.device.type == "cpu" else f"the engine runs on CPUs, the model is on {model.device}"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        threads: int | None = None,
        cache: str = "float32",
        instructions: str = "auto",
        max_length: int | None = None,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise InvalidRequestError(f"the model is {model!r:.40}; give a transformers causal LM (…ForCausalLM)")
        self.check_options(threads=threads, cache=cache, instructions=instructions, max_length=max_length)
        check_loaded(model)
        self._cache, self._instructions = cache, checked_instructions(instructions)
        n_threads = checked_threads(threads)
        self._engine = _native.Engine(pool_of(n_threads), self._instructions)
        self._compiled: _native.Model | None = None
        self._fallback: CausalLMVerifier | None = None
        self._description: dict[str, Any] = {}
        check_can_roll_back(model)
        try:
            architecture = Architecture(model, self._instructions, max_length)
            check_agrees(self._engine, architecture.model, model, architecture.windows)
        except UnsupportedModelError as error:
            self._fall_back(model, str(error), max_length)
        else:
            self._use(architecture, model)

    @staticmethod
    def check_options(
        *,
        threads: int | None = None,
        cache: str = "float32",
        instructions: str = "auto",
        max_length: int | None = None,
    ) -> None:
        """Refuse what no model could be run with on this machine."""
        choice(*_native.cache_formats()).check("cache", cache, who="native")
        optional(integer(at_least=1)).check("max_length", max_length, who="native")
        checked_instructions(instructions)
        checked_threads(threads)

    def _use(self, architecture: Architecture, model: PreTrainedModel) -> None:
        compiled = self._compiled = architecture.model
        self.vocab_size: int = compiled.vocab
        self.max_length: int | None = compiled.max_length or None
        self.invariance: Invariance = "bitwise"
        self.approximations: tuple[str, ...] = self._approximations(model)
        self._description = {
            "engine": "native",
            "context": self.max_length,
            "threads": self._engine.threads,
            "cache": self._cache,
            "instructions": self._instructions,
            "products": architecture.formats,
            "bytes_per_forward": compiled.nbytes,
        }

    def _approximations(self, model: PreTrainedModel) -> tuple[str, ...]:
        """What the engine does otherwise than the model, whose parts may be in 16 bits."""
        parts = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()} - {torch.float32}
        found = []
        if parts:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in parts))
            found.append(f"activations kept in float32 where the model rounds them to {names}")
        if self._cache != "float32":
            found.append(f"keys and values cached in {self._cache}")
        return tuple(found)

    def _fall_back(self, model: PreTrainedModel, reason: str, max_length: int | None) -> None:
        fallback = self._fallback = CausalLMVerifier(model, max_length=max_length)
        self.vocab_size, self.max_length = fallback.vocab_size, fallback.max_length
        self.invariance, self.approximations = fallback.invariance, fallback.approximations
        self._description = {**fallback.describe(), "reason": reason}

    def start(self, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> VerifySession:
        """Begin a sequence.

        Raises:
            UnsupportedModelError: ``needs`` names what there is not.
            InvalidRequestError: A prompt without a token, with one outside the vocabulary, or beyond the context.
        """
        if self._fallback is not None:
            return self._fallback.start(prompt_ids, needs)
        assert self._compiled is not None
        features = hidden_states_of(needs, self._compiled.layers, "native")
        prompt = checked_prompt(prompt_ids, self.vocab_size, self.max_length)
        return NativeSession(self._engine, self._compiled, self._cache, prompt, features)

    def strict(self) -> Verifier:
        """A verifier whose logits are bit-identical at any width: this one, unless transformers runs the model."""
        return self if self._fallback is None else self._fallback.strict()

    def describe(self) -> Mapping[str, Any]:
        """What runs the model: ``engine`` is ``"native"``, or ``"transformers"`` with a ``reason``."""
        return dict(self._description)
