"""The engine on SmolLM2: the text of transformers, and of plain decoding."""

from __future__ import annotations

import pytest

from quasar import Pipeline
from quasar.checkpoints.models import load_model
from quasar_native.verifier import NativeVerifier

pytestmark = pytest.mark.real_model

PROMPTS = ["What is the capital of France?", "Write a poem about the sea.", "Count from one to twenty."]


@pytest.fixture(scope="module")
def loaded():
    """The model and its tokenizer."""
    return load_model("smollm2")


def native(model, **options):
    verifier = NativeVerifier(model, **options)
    assert verifier.describe()["engine"] == "native"
    return verifier


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_of_the_full_model_is_that_of_transformers(loaded, prompt):
    """Token by token, with the verifier causal_lm as the gold."""
    choices = {"quantizer": "none", "drafter": "ngram"}
    expected = Pipeline.from_model(loaded.model, loaded.tokenizer, **choices).generate(prompt, max_new_tokens=60)
    pipeline = Pipeline.from_model(loaded.model, loaded.tokenizer, verifier=native, **choices)
    assert pipeline.generate(prompt, max_new_tokens=60).token_ids == expected.token_ids


@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("quantizer", ["w8a8:lm_head=true", "hqq"])
def test_drafts_change_nothing(loaded, quantizer, cache):
    """A quantized target against its own reference, with drafts that are accepted."""
    pipeline = Pipeline.from_model(
        loaded.model,
        loaded.tokenizer,
        quantizer=quantizer,
        verifier=lambda model: native(model, cache=cache),
        drafter="ngram:k=7",
    )
    result = pipeline.generate(PROMPTS[2], max_new_tokens=80)
    assert result.token_ids == pipeline.reference(PROMPTS[2], max_new_tokens=80).token_ids
    assert result.stats["accepted_tokens"] > 0
