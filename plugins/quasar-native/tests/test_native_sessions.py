"""Sessions of the engine, and what its verifier says of itself."""

from __future__ import annotations

import copy

import pytest
import torch
from native_models import model_of, random_tokens

from quasar import Pipeline
from quasar.errors import InvalidRequestError
from quasar.loop.checks import prefill
from quasar.testing import ConformanceError, check_verifier
from quasar.testing.models import greedy, random_prompt, tiny
from quasar.types import EMPTY_DRAFT, Draft
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar_native.verifier import NativeVerifier

TOKENS = random_tokens(80)


@pytest.mark.parametrize("cache", ["bfloat16", "int8"])
def test_a_cache_that_rounds_is_named_and_never_called_the_full_model(cache):
    """Its tokens differ from those of the model, so the claim must."""
    what = f"keys and values cached in {cache}"

    def verifier(model):
        return NativeVerifier(model, cache=cache)

    pipe = Pipeline.from_model(model_of("llama"), quantizer="none", verifier=verifier)
    guarantee = pipe.generate_ids(TOKENS[:5], max_new_tokens=4).guarantee
    assert guarantee.startswith(f"quantized: the tokens equal those of the model as it was given, with {what}, decoded")
    assert pipe.description["approximations"] == [what]
    with pytest.raises(InvalidRequestError, match=f"NativeVerifier approximates it .{what}"):
        Pipeline.from_model(model_of("llama"), quantizer="none", exact_to="full", verifier=verifier)
    silent = NativeVerifier(model_of("llama"), cache=cache)
    silent.approximations = ()
    with pytest.raises(ConformanceError, match="NativeVerifier lists no approximations"):
        check_verifier(silent, model_of("llama"), examples=1)


def test_a_model_in_16_bits_is_named_as_computed_in_32():
    """The engine does not round activations where the model does, so it does not say the model's own tokens."""
    model = copy.deepcopy(model_of("llama")).bfloat16()
    pipe = Pipeline.from_model(model, quantizer="none", verifier=NativeVerifier)
    assert pipe.verifier.describe()["engine"] == "native"
    assert pipe.description["approximations"] == ["activations kept in float32 where the model rounds them to bfloat16"]
    assert pipe.generate_ids(TOKENS[:5], max_new_tokens=4).guarantee.startswith("quantized: ")
    assert Pipeline.from_model(model_of("llama"), quantizer="none", verifier=NativeVerifier).exact_to == "full"


def test_a_fallback_approximates_nothing():
    """transformers runs it then, with a cache of its own."""
    verifier = NativeVerifier(tiny("gpt2"), cache="int8")
    assert verifier.describe()["engine"] == "transformers"
    assert verifier.approximations == ()


def test_where_a_prompt_is_cut_changes_no_bit():
    whole = NativeVerifier(model_of("llama")).start(TOKENS[:40])
    expected = whole.verify(Draft(TOKENS[40:44])).logits
    for rows in (1, 3, 39):
        session = NativeVerifier(model_of("llama")).start(TOKENS[:40])
        assert (session.cached_length, session.pending) == (0, 39)
        while session.pending:
            before = session.pending
            session.prefill(rows)
            assert session.pending == max(0, before - rows)
        assert torch.equal(session.verify(Draft(TOKENS[40:44])).logits, expected)
        session.close()
        with pytest.raises(InvalidRequestError, match="the session is closed"):
            session.verify(EMPTY_DRAFT)


def test_features_of_a_prompt_come_in_pieces():
    """As those of the causal LM, up to rounding."""
    tokens = [token_id % 64 for token_id in range(3, 203)]
    needs = frozenset({"hidden:-1"})
    session = NativeVerifier(model_of("llama")).start(tokens, needs)
    plain = CausalLMVerifier(model_of("llama")).start(tokens, needs)
    for one in (session, plain):
        prefill(one)
    found, expected = session.prompt_features["hidden:-1"], plain.prompt_features["hidden:-1"]
    assert found.shape == expected.shape == (199, expected.shape[1])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_a_context_that_scaling_extends_is_used():
    """The factor is counted once, and the longest sequence may be chosen."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    model = tiny("qwen2", max_position_embeddings=64, rope_parameters=yarn)
    verifier = NativeVerifier(model)
    assert verifier.describe()["engine"] == "native"
    assert (verifier.max_length, NativeVerifier(model, max_length=100).max_length) == (256, 100)
    assert NativeVerifier(tiny("gpt2"), max_length=100).max_length == 100
    pipe = Pipeline.from_model(model, quantizer="none", verifier=NativeVerifier)
    prompt = random_prompt(200)
    result = pipe.generate_ids(prompt, max_new_tokens=56, eos_token_id=None)
    assert list(result.token_ids) == greedy(model, prompt, 56)
    with pytest.raises(InvalidRequestError, match="the model's context is 256"):
        pipe.generate_ids(prompt, max_new_tokens=57)


def test_parts_in_16_bits_are_named_where_the_first_tensor_is_not():
    """What a model's own ``dtype`` says is that of one tensor."""
    model = copy.deepcopy(model_of("llama"))
    model.model.norm.half()
    assert model.dtype == torch.float32
    verifier = NativeVerifier(model)
    assert verifier.describe()["engine"] == "native"
    assert verifier.approximations == ("activations kept in float32 where the model rounds them to float16",)
