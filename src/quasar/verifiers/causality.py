"""Whether a model decodes as a causal LM does: what its attention declares and, where it declares nothing, a trial."""

from __future__ import annotations

from transformers import PreTrainedModel

from quasar.errors import QuasarError, UnsupportedModelError
from quasar.types import Draft
from quasar.verifiers.cache import described
from quasar.verifiers.causal_lm_session import CausalLMSession


def check_causal(model: PreTrainedModel) -> None:
    """Refuse, by name, a model whose rows depend on later tokens, or that does not go on from a key-value cache.

    Args:
        model: Prepared as a verifier runs it.

    Raises:
        UnsupportedModelError: It is such a model.
    """
    # An encoder beside the decoder, or attention across to one, may look ahead.
    found = [module.is_causal for module in model.modules() if isinstance(getattr(module, "is_causal", None), bool)]
    if not found:
        _try(model)
    elif not any(found):
        raise UnsupportedModelError(
            f"{described(model)} lets tokens attend to later ones, as an encoder does; give a causal LM, whose tokens "
            "attend to earlier ones only"
        )


def _try(model: PreTrainedModel) -> None:
    """Two tokens after one that is cached: some models have a cache of another kind, or take one token a forward."""
    try:
        CausalLMSession(model, [0, 0], {}).verify(Draft([0]))
    except QuasarError as error:
        raise UnsupportedModelError(f"{described(model)} cannot be decoded: {error}") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnsupportedModelError(f"{described(model)} cannot be decoded with a cache: {reason:.300}") from error
