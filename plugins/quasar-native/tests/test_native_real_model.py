"""The engine on SmolLM2: the text of transformers, and of plain decoding."""

from __future__ import annotations

import pytest

from quasar import Pipeline
from quasar.registry.registry import default_registry
from quasar_native.verifier import NativeVerifier

pytestmark = pytest.mark.real_model

PROMPTS = ["What is the capital of France?", "Write a poem about the sea.", "Count from one to twenty."]


def native(model, **options):
    verifier = NativeVerifier(model, **options)
    assert verifier.describe()["engine"] == "native"
    return verifier


@pytest.fixture(scope="module")
def pipelines(smollm2):
    """The full model as the target, by the verifier causal_lm and by the engine."""
    return [
        Pipeline.from_model(smollm2.model, smollm2.tokenizer, quantizer="none", drafter="ngram", verifier=verifier)
        for verifier in ("causal_lm", native)
    ]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_of_the_full_model_is_that_of_transformers(pipelines, prompt):
    """Token by token, with the verifier causal_lm as the gold."""
    expected, found = (pipeline.generate(prompt, max_new_tokens=40) for pipeline in pipelines)
    assert found.token_ids == expected.token_ids


@pytest.fixture(scope="module", params=["w8a8:lm_head=true", "gguf"])
def quantized(request, smollm2):
    """The quantized model, which the tests of all caches share."""
    return default_registry().build("quantizer", request.param).quantize(smollm2.model).model


@pytest.mark.parametrize(("cache", "threads"), [("float32", 2), ("bfloat16", 1), ("int8", 1)])
def test_drafts_change_nothing(smollm2, quantized, cache, threads):
    """A quantized target against its own reference, with drafts that are accepted."""
    verifier = native(quantized, cache=cache, threads=threads)
    pipeline = Pipeline(verifier, smollm2.tokenizer, drafter="ngram:k=7", exact_to="quantized")
    result = pipeline.generate(PROMPTS[2], max_new_tokens=48)
    assert result.token_ids == pipeline.reference(PROMPTS[2], max_new_tokens=48).token_ids
    assert result.stats["accepted_tokens"] > 0
