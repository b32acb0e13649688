"""How long a sequence a model takes, and models whose rotary embedding switches on the way there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quasar import Pipeline
from quasar.errors import InvalidRequestError
from quasar.loop.checks import prefill
from quasar.testing import check_verifier
from quasar.testing.models import greedy, random_prompt, tiny
from quasar.testing.running import examples
from quasar.types import EMPTY_DRAFT, Draft
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.verifiers.causal_lm_session import CausalLMSession

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + 3 * i for i in range(8)],
    "original_max_position_embeddings": 32,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
SWITCH = 32
MODEL = tiny("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=SWITCH)
VERIFIER = CausalLMVerifier(MODEL)
STRICT = VERIFIER.strict()


def half_right(expected):
    """A drafter that knows what follows, and errs in every fourth token."""

    def draft(token_ids, k):
        known = [token_id if i % 4 else 5 for i, token_id in enumerate(expected)]
        return known[len(token_ids) : len(token_ids) + k]

    return draft


@pytest.mark.parametrize(
    ("length", "strict"), [(20, False), (25, True), (31, True), (32, False), (33, True), (40, False)]
)
def test_what_a_switching_model_says_does_not_depend_on_drafts(length, strict):
    """Across the length at which Phi-3 takes other frequencies: the reference's tokens, and those of ``generate``."""
    prompt, verifier = random_prompt(length, seed=length), STRICT if strict else VERIFIER
    expected = greedy(MODEL, prompt, 60)
    for drafter in ("ngram", half_right([*prompt, *expected])):
        pipe = Pipeline.from_model(MODEL, quantizer="none", verifier=lambda model: verifier, drafter=drafter)
        result = pipe.generate_ids(prompt, max_new_tokens=60, eos_token_id=None)
        reference = pipe.reference(prompt, max_new_tokens=60, eos_token_id=None)
        assert list(result.token_ids) == expected == list(reference.token_ids)
    assert result.stats["accepted_tokens"] > 20
    assert pipe.description["verification"]["context"] == 256


def test_rows_across_the_switch_are_those_of_a_forward_over_the_whole_past():
    """Each with the frequencies that a call whose largest position it is takes."""
    tokens = random_prompt(44)
    session = VERIFIER.start(tokens[:28])
    rows = session.verify(Draft(tokens[28:])).logits
    for row, end in zip(rows, range(28, 45), strict=True):
        with torch.no_grad():
            expected = tiny_logits(tokens[:end])
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-3)


def tiny_logits(token_ids):
    return MODEL(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def test_a_switching_session_says_what_a_new_one_says(monkeypatch):
    """Bit for bit in a strict verifier, whatever was drafted and taken back; restarted, as a new one."""
    monkeypatch.setattr(CausalLMSession, "piece", 8)
    tokens = random_prompt(64)
    crossed = 0

    steps_of = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5)

    @given(st.integers(20, 40), steps_of, st.integers(1, 40))
    @examples(25)
    def check(length: int, steps: list[tuple[int, int]], other: int) -> None:
        nonlocal crossed
        session, plain = STRICT.start(tokens[:length]), STRICT.start(tokens[:length])
        at = length
        for k, kept in steps:
            draft = tokens[at : at + min(k, kept)] + [3] * max(0, k - kept)
            rows, kept = session.verify(Draft(draft)).logits, min(k, kept)
            crossed += at <= SWITCH < at + k
            for row in rows[: kept + 1]:
                assert torch.equal(row, plain.verify(EMPTY_DRAFT).logits[0])
                plain.commit([tokens[at]])
                at += 1
            session.commit(tokens[at - kept - 1 : at])
        session.restart(tokens[:other])
        found, expected = session.verify(EMPTY_DRAFT).logits, fresh(STRICT, tokens[:other])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # a prompt is rounded a little otherwise

    check()
    assert crossed >= 10


def fresh(verifier, token_ids):
    session = verifier.start(token_ids)
    prefill(session)
    return session.verify(EMPTY_DRAFT).logits


def test_a_switching_verifier_keeps_its_protocol_and_its_model():
    before = MODEL.model.rotary_emb.inv_freq.clone()
    check_verifier(CausalLMVerifier(MODEL), MODEL, examples=4)
    fresh(VERIFIER, random_prompt(50))
    assert torch.equal(MODEL.model.rotary_emb.inv_freq, before)


def test_a_context_ends_where_every_further_token_would_change_earlier_ones():
    """Dynamic NTK has other frequencies at each length: it is run as far as it has one set, and the reason is said."""
    model = tiny("llama", rope_parameters=DYNAMIC, max_position_embeddings=64)
    assert CausalLMVerifier(model).max_length == 64
    verifier = CausalLMVerifier(model, max_length=128)
    assert verifier.max_length == 64
    assert verifier.describe()["context_reason"].startswith("beyond 64 positions a rotary embedding of type 'dynamic'")
    assert "context_reason" not in CausalLMVerifier(model).describe()
    reason = r"context is 64 \(beyond 64 positions a rotary embedding of type 'dynamic' would change earlier ones\); "
    with pytest.raises(InvalidRequestError, match=f"{reason}at most 4 new tokens fit"):
        Pipeline(verifier).generate_ids(random_prompt(60))
    with pytest.raises(InvalidRequestError, match=f"{reason}shorten the prompt"):
        verifier.start(random_prompt(65))
    with pytest.raises(InvalidRequestError, match="context is 64; at most 4 new tokens fit"):
        Pipeline(CausalLMVerifier(model)).generate_ids(random_prompt(60))
    prompt = random_prompt(20)
    pipe = Pipeline.from_model(model, quantizer="none", drafter="ngram", verifier="causal_lm")
    found = pipe.generate_ids(prompt, max_new_tokens=44, eos_token_id=None).token_ids
    assert list(found) == greedy(model, prompt, 44)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rope_parameters": YARN}, 256),
        ({"rope_parameters": YARN, "max_position_embeddings": 256}, 256),
        ({"rope_parameters": LINEAR}, 256),
        ({}, 64),
    ],
)
def test_a_context_that_scaling_extends_is_used(options, expected):
    """The factor is counted once: not again where the configuration has counted it."""
    model = tiny("qwen2", **{"max_position_embeddings": 64, **options})
    pipe = Pipeline.from_model(model, quantizer="none", verifier="causal_lm")
    assert pipe.verifier.max_length == expected
    prompt = random_prompt(expected - 20)
    result = pipe.generate_ids(prompt, max_new_tokens=20, eos_token_id=None)
    assert list(result.token_ids) == greedy(model, prompt, 20)
    with pytest.raises(InvalidRequestError, match=f"the model's context is {expected}"):
        pipe.generate_ids(prompt, max_new_tokens=21)


def test_a_configuration_for_layers_of_several_kinds_counts_the_factor_already():
    ropes = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert CausalLMVerifier(tiny("gemma3", rope_parameters=ropes)).max_length == 256


def test_the_longest_sequence_may_be_chosen():
    assert Pipeline.from_model(tiny("llama"), verifier="causal_lm:max_length=32").verifier.max_length == 32
    assert CausalLMVerifier(tiny("llama"), max_length=512).strict().max_length == 512
    with pytest.raises(InvalidRequestError, match="max_length=512: GPT2LMHeadModel has 256 positions"):
        CausalLMVerifier(tiny("gpt2"), max_length=512)
    with pytest.raises(InvalidRequestError, match="max_length=0, expected an integer of at least 1"):
        Pipeline.from_model(tiny("llama"), verifier="causal_lm:max_length=0")


@pytest.mark.parametrize("quantizer", ["none", "w8a8"])
def test_a_model_without_values_is_refused_by_the_name_of_a_tensor(quantizer):
    model = tiny("llama").to("meta")
    with pytest.raises(InvalidRequestError, match=r"model.embed_tokens.weight of LlamaForCausalLM has no values"):
        Pipeline.from_model(model, quantizer=quantizer)


class OtherArithmeticForManyRows(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.weight, self.bias = layer.weight, None

    def forward(self, inputs):
        return nn.functional.linear(inputs if inputs.shape[-2] < 17 else (inputs * 4).round() / 4, self.weight)


def test_a_draft_wider_than_what_is_tried_is_computed_in_forwards_that_are_not():
    """A layer whose arithmetic is another one for 17 rows and more says of 31 rows what it says of each alone."""
    model, tokens = tiny("llama"), random_prompt(40)
    model.model.layers[0].mlp.down_proj = OtherArithmeticForManyRows(model.model.layers[0].mlp.down_proj)
    verifier = CausalLMVerifier(model)
    plain = verifier.start(tokens[:5])
    for row, token_id in zip(verifier.start(tokens[:5]).verify(Draft(tokens[5:35])).logits, tokens[5:36], strict=True):
        torch.testing.assert_close(row, plain.verify(EMPTY_DRAFT).logits[0], rtol=0, atol=1e-4)
        plain.commit([token_id])
