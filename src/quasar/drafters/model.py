"""Another causal LM drafts, usually a smaller one of the same family.

It decodes its drafts itself, so underneath is a :class:`quasar.drafters.nested.NestedDrafter` whose inner loop has no
drafter. Token ids mean something only within a vocabulary, so those of the two models are compared: where an id stood
for two texts, the output would still be the target's, but hardly a guess would be right and nothing would say why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from quasar.checkpoints.models import LoadedModel, check_loadable, load_model
from quasar.drafters.nested import DraftLengths, NestedDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.options import Expectation, flag
from quasar.protocols import DraftSession, VerifySession
from quasar.verifiers.causal_lm import CausalLMVerifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = Expectation(
    "the model that drafts, as in model:name=FOLDER", lambda name: isinstance(name, str | LoadedModel) and bool(name)
)
_OPT_OUT = "any_vocabulary=true drafts all the same (the output stays the target's, the guesses may be useless)"


class ModelDrafter:
    """Drafts with a causal LM, which is loaded when the drafter is bound to the target's model.

    Args:
        name: As of ``Pipeline.from_pretrained``: Hub id, folder, path of a ``.gguf`` file, or ``smollm2``. Or a model
            that is loaded already, as a :class:`quasar.checkpoints.models.LoadedModel`; it is not changed, and may be
            the target's.
        k: Tokens a draft has at most.
        min_k: Below ``k``: drafts get shorter, down to this, while they are not confirmed. ``None``: as ``k``.
        max_k: Above ``k``: drafts get longer, up to this, while they are confirmed whole. ``None``: as ``k``.
        min_margin: As of :class:`quasar.drafters.nested.DraftLengths`.
        any_vocabulary: Do not compare the vocabularies.
        dtype: What to load the model in; ``None``: as ``Pipeline.from_pretrained`` does.

    Raises:
        InvalidRequestError: An option that is not one.
        ModelNotFoundError: There is no such file or folder. Whether a Hub id exists shows when it is loaded.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        name: str | LoadedModel,
        k: int = 5,
        min_k: int | None = None,
        max_k: int | None = None,
        min_margin: float = 0.0,
        any_vocabulary: bool = False,
        dtype: str | None = None,
    ) -> None:
        _NAME.check("name", name, who="model")
        flag().check("any_vocabulary", any_vocabulary, who="model")
        if isinstance(name, str):
            check_loadable(name, dtype)
        self._name, self._dtype = name, dtype
        self._any_vocabulary = any_vocabulary
        self._lengths = DraftLengths(k, k if min_k is None else min_k, k if max_k is None else max_k, min_margin)

    def bind(self, model: PreTrainedModel, tokenizer: Any, calibration: Sequence[Tensor] | None) -> NestedDrafter:
        """Load the model that drafts, and compare its vocabulary; see :class:`quasar.protocols.Bindable`."""
        loaded = self._name
        if isinstance(loaded, str):
            loaded = load_model(loaded, dtype=self._dtype, device=model.device)
        if not self._any_vocabulary:
            check_same_vocabulary(loaded.tokenizer, tokenizer)
        vocab_size = model.config.get_text_config().vocab_size
        verifier = CausalLMVerifier(loaded.model)
        return NestedDrafter(EmptyDrafter(), verifier, vocab_size=vocab_size, **attrs.asdict(self._lengths))

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> DraftSession:
        raise InvalidRequestError(
            "model: there is no target to compare vocabularies with; make the pipeline of a model "
            "(Pipeline.from_model, from_pretrained)"
        )


def check_same_vocabulary(tokenizer: Any, target_tokenizer: Any) -> None:
    """Compare what each id stands for, special and added tokens included. An id that only one of the two has is fine.

    Raises:
        InvalidRequestError: An id stands for two texts, or one of the tokenizers cannot tell.
    """
    own, target = _texts_of(tokenizer), _texts_of(target_tokenizer)
    for who, texts in (("that drafts", own), ("of the target", target)):
        if not texts:
            raise InvalidRequestError(
                f"model: the model {who} comes without a tokenizer that lists its vocabulary, so the two vocabularies "
                f"cannot be compared; {_OPT_OUT}"
            )
    for token_id in sorted(own.keys() & target.keys()):
        if own[token_id] != target[token_id]:
            raise InvalidRequestError(
                f"model: token id {token_id} is {own[token_id]!r} to the model that drafts and {target[token_id]!r} to "
                f"the target; take a model with the target's vocabulary, or {_OPT_OUT}"
            )


def _texts_of(tokenizer: Any) -> dict[int, str]:
    list_vocabulary = getattr(tokenizer, "get_vocab", None)
    return {} if list_vocabulary is None else {token_id: text for text, token_id in list_vocabulary().items()}
