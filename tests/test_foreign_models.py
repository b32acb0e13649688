"""Models that cannot be decoded are refused by what they lack, in one line, whichever verifier is asked."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from quasar import Pipeline
from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.verifiers.causal_lm import CausalLMVerifier


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


@pytest.mark.parametrize("prompt", [[1], [1, 2, 3]])
def test_a_model_that_does_not_use_the_cache_is_told_so(prompt):
    """It would be computed anew for every token, or for ever."""
    model = Own(OwnConfig(num_hidden_layers=2)).eval()
    pipe = Pipeline.from_model(model, quantizer="none", verifier=CausalLMVerifier)
    with pytest.raises(UnsupportedModelError, match="has cached 0; it needs a key-value cache of transformers' kind"):
        pipe.generate_ids(prompt, max_new_tokens=3)


def test_a_model_that_does_not_generate_is_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=64, **sizes)).eval()
    with pytest.raises(UnsupportedModelError, match=r"BertForMaskedLM .* does not generate text"):
        Pipeline.from_model(model, quantizer="none")


def test_a_model_in_the_place_of_a_name_is_refused_with_the_call_that_takes_it():
    with pytest.raises(InvalidRequestError, match=r"takes the name of a model, got Own\(.*from_model takes one"):
        Pipeline.from_pretrained(Own(OwnConfig()))
