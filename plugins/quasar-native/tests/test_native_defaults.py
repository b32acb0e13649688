"""Whatever torch's defaults are, what is handed to compiled code is in float32 and on the CPU."""

from __future__ import annotations

import pytest
from native_models import model_of

from quasar import Pipeline
from quasar.registry.registry import default_registry
from quasar.testing.running import other_defaults

MODEL = model_of("llama")
LONG = {"max_new_tokens": 24, "eos_token_id": None}


@pytest.fixture(autouse=True)
def native_by_name(monkeypatch):
    """Kernel and verifier of this plug-in can be named."""
    monkeypatch.setenv("QUASAR_PLUGINS", "quasar-native")
    default_registry.cache_clear()
    yield
    default_registry.cache_clear()


@pytest.mark.parametrize("verifier", ["native", "causal_lm"])
@pytest.mark.parametrize("quantizer", ["none", "w8a8:kernel=native", "hqq:group=32,kernel=native"])
def test_other_defaults_give_the_same_tokens(quantizer, verifier):
    """Of a pipeline that was built before, and of one that is built under them."""
    choices = {"quantizer": quantizer, "verifier": verifier, "drafter": "ngram"}
    pipe = Pipeline.from_model(MODEL, **choices)
    expected = pipe.generate_ids([1, 5, 9, 5, 9], **LONG).token_ids
    assert len(set(expected)) > 5
    with other_defaults():
        assert pipe.generate_ids([1, 5, 9, 5, 9], **LONG).token_ids == expected
        assert Pipeline.from_model(MODEL, **choices).generate_ids([1, 5, 9, 5, 9], **LONG).token_ids == expected
