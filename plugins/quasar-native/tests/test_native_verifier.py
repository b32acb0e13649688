"""The verifier ``native``: what it computes is what transformers computes, at any width to the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from native_models import FORMATS, SUPPORTED, in_format, model_of, plain_logits, random_tokens, smollm3

from quasar import Pipeline
from quasar.errors import InvalidRequestError, NumericalError, UnsupportedModelError
from quasar.testing import check_verifier
from quasar.testing.models import tiny
from quasar.types import EMPTY_DRAFT, Draft
from quasar.verifiers.invariance import logits_at_width
from quasar.weights.layers import structure_copy
from quasar.weights.linear import QuantizedLinear
from quasar_native import _native
from quasar_native.errors import ContextOverflowError
from quasar_native.kernel import NativeKernel, checked_instructions
from quasar_native.verifier import NativeVerifier
from quasar_native.weights import Weights

FAMILIES = (*SUPPORTED, "smollm3")
CACHES = ("float32", "bfloat16", "int8")
TOKENS = random_tokens(80)

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
}

VARIANTS = {
    "biases": lambda: tiny("llama", attention_bias=True, mlp_bias=True),
    "tied head": lambda: tiny("llama", tie_word_embeddings=True),
    "linear rope": lambda: tiny("llama", rope_parameters=ROPES["linear"]),
    "llama3 rope": lambda: tiny("llama", rope_parameters=ROPES["llama3"]),
    "yarn rope": lambda: tiny("qwen3", rope_parameters=ROPES["yarn"]),
    "one key-value head": lambda: tiny("llama", num_key_value_heads=1),
    "as many key-value heads": lambda: tiny("llama", num_key_value_heads=4),
    "three queries a key": lambda: tiny("llama", hidden_size=96, num_attention_heads=6),
    "seven queries a key": lambda: tiny("llama", hidden_size=112, num_attention_heads=7, num_key_value_heads=1),
    "heads of 20": lambda: tiny("llama", head_dim=20),
    "heads of 128": lambda: tiny("llama", head_dim=128),
    "another epsilon": lambda: tiny("llama", rms_norm_eps=0.3),
    "gelu": lambda: tiny("llama", hidden_act="gelu_pytorch_tanh"),
    "some layers slide": lambda: tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "window of one": lambda: tiny("mistral_window", sliding_window=1),
    "no window": lambda: tiny("mistral_window", sliding_window=None),
    "windows without positions": lambda: smollm3(use_sliding_window=True, sliding_window=8),
    "logits capped": lambda: tiny("gemma3", final_logit_softcapping=3.0),
    "scores capped": lambda: tiny("gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=5.0),
    "a scalar of its own": lambda: tiny("gemma3", query_pre_attn_scalar=100),
}


def native(model, **options) -> NativeVerifier:
    """The verifier, which must not fall back."""
    verifier = NativeVerifier(model, **{"threads": 1, **options})
    assert verifier.describe()["engine"] == "native", verifier.describe()
    assert verifier.invariance == "bitwise"
    return verifier


@pytest.mark.parametrize("family", FAMILIES)
def test_the_protocol_is_kept(family):
    """Rollback, restarts, interleaved sessions, long drafts: bit by bit."""
    check_verifier(native(model_of(family)), examples=15)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", FORMATS)
def test_the_protocol_is_kept_in_every_format(form, cache):
    """What is forgotten leaves no trace in any cache."""
    check_verifier(native(in_format(form), cache=cache), examples=5)


@pytest.mark.parametrize("instructions", _native.available_instructions())
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, instructions):
    """A prompt, then a draft on top of the cache, across the edge of every window."""
    model = model_of(family)
    logits = native(model, instructions=instructions).start(TOKENS[:5]).verify(Draft(TOKENS[5:])).logits
    torch.testing.assert_close(logits, plain_logits(model, TOKENS)[4:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_for_every_variant(variant):
    """Options of the configurations that change what is computed."""
    model = VARIANTS[variant]()
    session = native(model).start(TOKENS[:5])
    logits = session.verify(Draft(TOKENS[5:])).logits
    torch.testing.assert_close(logits, plain_logits(model, TOKENS)[4:], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("form", "tolerance"), [(form, 0.5 if "a8" in form else 0.15) for form in FORMATS])
def test_logits_of_every_format_are_those_of_its_layers_in_transformers(form, tolerance):
    """Up to the rounding of activations to integers, and of everything to bfloat16."""
    model = in_format(form)
    logits = native(model).start(TOKENS[:5]).verify(Draft(TOKENS[5:])).logits
    expected = plain_logits(model, TOKENS)[4:]
    exact = form in ("float32", "ordered") or form.startswith("hqq groups")
    difference = float((logits - expected).square().mean().sqrt() / expected.std())
    assert difference < (1e-5 if exact else tolerance)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_has_the_same_bits_at_any_width_position_and_number_of_threads(form, cache):
    """Widths 1 to 32, 1 to 4 threads: every row is that of decoding one token a step on one thread."""
    alone = logits_at_width(native(in_format(form), cache=cache), TOKENS[:70], 5, 1)
    for threads in (1, 2, 3, 4):
        verifier = native(in_format(form), cache=cache, threads=threads)
        for width in range(1, 33):
            rows = logits_at_width(verifier, TOKENS[:70], 5, width)
            assert torch.equal(rows, alone[: len(rows)]), (threads, width)


@pytest.mark.parametrize("instructions", _native.available_instructions())
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_width_in_any_architecture_and_instruction_set(family, instructions):
    """Windows, norms of heads and caps see one row at a time."""
    verifier = native(model_of(family), instructions=instructions, threads=2)
    alone = logits_at_width(verifier, TOKENS, 3, 1)
    for width in (2, 3, 8, 16, 31, 77):
        rows = logits_at_width(verifier, TOKENS, 3, width)
        assert torch.equal(rows, alone[: len(rows)]), width


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_gives_the_bits_of_decoding_it(cache):
    """300 tokens: in blocks of rows, and more than one block of the cache."""
    model = tiny("llama", max_position_embeddings=512, hidden_size=96, num_attention_heads=6, head_dim=24)
    tokens = random_tokens(300)
    verifier = native(model, cache=cache, threads=2)
    alone = verifier.start(tokens[:1])
    for token_id in tokens[1:]:
        alone.commit([token_id])
        last = alone.verify(EMPTY_DRAFT).logits
    assert torch.equal(verifier.start(tokens).verify(EMPTY_DRAFT).logits, last)
    assert torch.equal(verifier.start(tokens[:1]).verify(Draft(tokens[1:])).logits[-1:], last)


@pytest.mark.parametrize(("cache", "tolerance"), [("bfloat16", 0.03), ("int8", 0.06)])
def test_a_small_cache_changes_logits_by_its_rounding_alone(cache, tolerance):
    """Some change there must be, else the option does nothing."""
    exact = native(model_of("llama")).start(TOKENS[:40]).verify(Draft(TOKENS[40:])).logits
    rounded = native(model_of("llama"), cache=cache).start(TOKENS[:40]).verify(Draft(TOKENS[40:])).logits
    difference = float((exact - rounded).square().mean().sqrt() / exact.std())
    assert 1e-4 < difference < tolerance


def test_what_the_kernel_has_packed_is_shared():
    """Not packed again for the engine, unless for other instructions; the logits are the same."""
    packed = structure_copy(in_format("w8a8"))
    for layer in packed.modules():
        if isinstance(layer, QuantizedLinear):
            layer.executor = NativeKernel(threads=1).prepare(layer.executor.weight)
    down = packed.model.layers[0].mlp.down_proj
    auto, portable = checked_instructions("auto"), "portable"
    weights, _ = Weights(auto).projection([("down", down)])
    assert weights == [down.executor.packed_for(auto)]
    assert Weights(portable).projection([("down", down)])[0] != weights or auto == portable
    logits = native(packed).start(TOKENS[:9]).verify(Draft(TOKENS[9:20])).logits
    assert torch.equal(logits, native(in_format("w8a8")).start(TOKENS[:9]).verify(Draft(TOKENS[9:20])).logits)


def test_hidden_states_come_where_they_are_asked_for():
    """Those after the last norm, one row a position."""
    model = model_of("llama")
    session = native(model).start(TOKENS[:5], frozenset({"hidden:-1"}))
    found = session.verify(Draft(TOKENS[5:12]))
    with torch.no_grad():
        output = model(torch.tensor([TOKENS[:12]]), output_hidden_states=True)
    torch.testing.assert_close(found.features["hidden:-1"], output.hidden_states[-1][0, 4:], rtol=0, atol=1e-4)
    assert native(model).start(TOKENS[:5]).verify(EMPTY_DRAFT).features == {}


def test_two_sessions_on_two_threads_say_what_they_say_alone():
    """Scratch memory is never shared by two forwards."""
    verifier = native(tiny("qwen3", num_hidden_layers=4), threads=2)
    texts = [random_tokens(150, seed) for seed in (1, 2, 3, 4)]
    expected = [logits_at_width(verifier, text, 20, 5) for text in texts]
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda text: logits_at_width(verifier, text, 20, 5), texts))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_sequence_beyond_the_context_is_an_error_with_a_name():
    """Nothing of it is kept: the session goes on up to the last position."""
    verifier = native(tiny("llama", max_position_embeddings=16))
    assert verifier.max_length == 16
    session = verifier.start(TOKENS[:10])
    with pytest.raises(ContextOverflowError, match=r"17 tokens.*context is 16"):
        session.verify(Draft(TOKENS[10:17]))
    logits = session.verify(Draft(TOKENS[10:16])).logits
    assert torch.equal(logits, native(model_of("llama")).start(TOKENS[:10]).verify(Draft(TOKENS[10:16])).logits)
    with pytest.raises(InvalidRequestError, match="context"):
        verifier.start(TOKENS[:18])


def test_weights_that_are_not_finite_are_an_error_with_a_name():
    """Found when the model is tried."""
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(NumericalError, match="LlamaForCausalLM: its logits are not finite"):
        NativeVerifier(model)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("form", ["float32", "w8a8", "hqq a8 groups of 32"])
def test_a_position_that_is_not_finite_is_named_and_spoils_nothing_else(form, cache):
    """A token whose embedding is NaN, at the end of a draft; the session is then used without it."""
    verifier = native(in_format(form, "qwen2"), cache=cache)
    expected = verifier.start(TOKENS[:6]).verify(Draft(TOKENS[6:9])).logits
    embedding = in_format(form, "qwen2").get_input_embeddings().weight
    poison = next(token_id for token_id in range(64) if token_id not in TOKENS[:9])
    kept = embedding[poison].clone()
    with torch.no_grad():
        embedding[poison] = float("nan")
    try:
        session = verifier.start(TOKENS[:6])
        with pytest.raises(NumericalError, match="position 8 "):
            session.verify(Draft([*TOKENS[6:8], poison]))
        assert torch.equal(session.verify(Draft(TOKENS[6:9])).logits, expected)
    finally:
        with torch.no_grad():
            embedding[poison] = kept


@pytest.mark.parametrize("prompt", [[], [64], [-1, 3]], ids=["empty", "too high", "negative"])
def test_a_prompt_that_is_no_sequence_of_the_vocabulary_is_refused(prompt):
    """An id outside the vocabulary would be read beyond the embedding."""
    with pytest.raises(InvalidRequestError, match="prompt"):
        native(model_of("llama")).start(prompt)


def test_a_need_that_cannot_be_met_is_refused():
    """The message names it."""
    with pytest.raises(UnsupportedModelError, match=r"attentions.*native has 'hidden:-1'"):
        native(model_of("llama")).start(TOKENS, frozenset({"attentions"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"threads": "two"}, "threads='two'"),
        ({"cache": "int4"}, "native: cache='int4', expected one of float32, bfloat16, int8"),
        ({"instructions": "mmx"}, "mmx"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    """Before the model is looked at."""
    with pytest.raises(InvalidRequestError, match=message):
        NativeVerifier(model_of("llama"), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pipeline_generates_what_plain_decoding_does(family):
    """With drafts, and w8a8 weights, against its own reference."""
    pipeline = Pipeline.from_model(model_of(family), quantizer="w8a8", verifier=NativeVerifier, drafter="ngram:k=6")
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    result = pipeline.generate_ids(prompt, max_new_tokens=40, eos_token_id=None)
    assert result.token_ids == pipeline.reference(prompt, max_new_tokens=40, eos_token_id=None).token_ids
