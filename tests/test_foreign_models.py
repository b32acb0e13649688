"""Models that cannot be decoded are refused by what they lack, in one line, whichever verifier is asked."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    ViTConfig,
    XLMConfig,
    XLMWithLMHeadModel,
    XLNetConfig,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from quasar import Pipeline
from quasar.checkpoints.models import load_model
from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.verifiers.context import declared_length


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=64, **others):
        self.vocab_size, self.hidden_size = vocab_size, 16
        super().__init__(**others)


class Own(PreTrainedModel, GenerationMixin):
    """A causal LM of somebody's own that caches nothing."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.head = nn.Embedding(config.vocab_size, 16), nn.Linear(16, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **options):
        return CausalLMOutputWithPast(logits=self.head(self.embedding(input_ids)))


def test_a_model_that_says_nothing_of_a_cache_is_told_what_is_missing():
    with pytest.raises(UnsupportedModelError, match=r"Own .* says nothing of a key-value cache.*lacks num_hidden"):
        Pipeline.from_model(Own(OwnConfig()).eval(), quantizer="none")


def test_a_model_that_does_not_use_the_cache_is_told_so():
    """It would be computed anew for every token, or for ever."""
    model = Own(OwnConfig(num_hidden_layers=2)).eval()
    said = r"^Own \(model type 'own'\) cannot be decoded: the model .* has cached 0; it needs a key-value cache of tr"
    with pytest.raises(UnsupportedModelError, match=said):
        CausalLMVerifier(model)


def test_a_model_that_fails_in_the_trial_is_refused_with_what_it_said():
    """Nobody else's traceback, in one line."""

    class Failing(Own):
        def forward(self, input_ids, **options):
            raise AssertionError("one token\nat a time")

    said = r"^Failing \(model type 'own'\) cannot be decoded with a cache: AssertionError: one token at a time$"
    with pytest.raises(UnsupportedModelError, match=said):
        CausalLMVerifier(Failing(OwnConfig(num_hidden_layers=2)).eval())


SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
ENCODER = {"vocab_size": 64, **SIZES}


def test_an_encoder_with_a_head_for_texts_is_refused_unless_it_is_told_to_look_back_only():
    """transformers loads it as a causal LM, with a warning that nobody reads, and what it says is nonsense."""
    with pytest.raises(UnsupportedModelError, match=r"^BertLMHeadModel .* lets tokens attend to later ones, as an enc"):
        CausalLMVerifier(BertLMHeadModel(BertConfig(**ENCODER)).eval())
    assert CausalLMVerifier(BertLMHeadModel(BertConfig(**ENCODER, is_decoder=True)).eval()).vocab_size == 64


@pytest.mark.parametrize("causal", [False, True])
def test_xlm_is_refused_by_its_name(causal):
    """Its cache is of a kind of its own, whether it looks ahead or not."""
    sizes = {"vocab_size": 64, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 64}
    model = XLMWithLMHeadModel(XLMConfig(**sizes, causal=causal)).eval()
    with pytest.raises(UnsupportedModelError, match=r"^XLMWithLMHeadModel \(model type 'xlm'\) cannot be decoded: "):
        CausalLMVerifier(model)


def test_a_model_without_an_end_of_its_positions_has_no_context():
    """XLNet declares -1, which was taken for a context of 0."""
    assert declared_length(XLNetConfig()) is None


@pytest.mark.parametrize(("config", "kind"), [(T5Config(), "T5Config"), (ViTConfig(), "ViTConfig")])
def test_a_name_of_what_is_no_causal_lm_is_refused_by_its_configuration(tmp_path, config, kind):
    """Not with the class of the configuration and the hundreds that would do."""
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(tmp_path))
    assert str(caught.value) == (
        f"model {str(tmp_path)!r} has the configuration {kind}, for which transformers has no causal LM; give a "
        "decoder-only language model (…ForCausalLM)"
    )


def test_a_model_that_does_not_generate_is_refused():
    model = BertForMaskedLM(BertConfig(**ENCODER)).eval()
    with pytest.raises(UnsupportedModelError, match=r"BertForMaskedLM .* does not generate text"):
        Pipeline.from_model(model, quantizer="none")


def test_a_model_in_the_place_of_a_name_is_refused_with_the_call_that_takes_it():
    with pytest.raises(InvalidRequestError, match=r"takes the name of a model, got Own\(.*from_model takes one"):
        Pipeline.from_pretrained(Own(OwnConfig()))
