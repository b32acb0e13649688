"""The claims on a real model: SmolLM2-135M-Instruct."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from quasar import Pipeline
from quasar.pipeline.prompts import encode_prompt
from quasar.registry.registry import default_registry
from quasar.testing.fakes import scripted
from quasar.testing.running import examples
from quasar.types import Draft
from quasar.verifiers import causal_lm_session

pytestmark = pytest.mark.real_model

N = 24
PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that adds two numbers, and one that multiplies them.",
    "List the days of the week, each with a short description.",
    "Übersetze ins Englische: Der Himmel ist blau und die Sonne scheint.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "Is water wet?"}],
][: examples(4).max_examples]
TEXT = """\
The old lighthouse stood at the end of the pier, where the river met the sea. Every evening the keeper climbed the
narrow stairs, cleaned the great lens, and lit the lamp. On clear nights its light could be seen from twenty miles
away. He wrote down the ships that passed, the weather, and the birds that rested on the railing. In forty years he
missed only two evenings: once because of a storm, and once because his daughter was born. When the new electric
light was installed, nobody needed a keeper any more, but he still came every evening to look at the sea."""


@pytest.fixture(scope="module")
def targets(smollm2):
    """A pipeline over each target; the drafter is replaced by the tests."""
    return {
        quantizer: Pipeline.from_model(smollm2.model, smollm2.tokenizer, quantizer=quantizer, drafter="ngram")
        for quantizer in ("w8a8", "none")
    }


@pytest.fixture(scope="module")
def references(targets):
    """What each target says alone, one token a step."""
    return {
        quantizer: [pipe.reference(prompt, max_new_tokens=N) for prompt in PROMPTS]
        for quantizer, pipe in targets.items()
    }


def drafting(pipe: Pipeline, drafter) -> Pipeline:
    """The same target with another drafter."""
    other = copy.copy(pipe)
    other.drafter = default_registry().build("drafter", drafter)
    return other


@pytest.mark.parametrize("quantizer", ["w8a8", "none"])
def test_ngram_drafts_change_no_token(targets, references, quantizer):
    """Text, tokens and the reason to end are those of the target alone, in fewer steps."""
    steps = 0
    for prompt, reference in zip(PROMPTS, references[quantizer], strict=True):
        result = targets[quantizer].generate(prompt, max_new_tokens=N)
        assert result.token_ids == reference.token_ids
        assert (result.text, result.finish_reason) == (reference.text, reference.finish_reason)
        steps += result.stats["steps"]
    assert steps < sum(len(reference.token_ids) for reference in references[quantizer])


@pytest.mark.parametrize("quantizer", ["w8a8", "none"])
@pytest.mark.parametrize("bad", [0, 5])
def test_long_drafts_that_are_accepted_change_no_token(targets, references, quantizer, bad):
    """Drafts of 12 from the output itself: forwards of width 13, whose rows must equal those of width 1."""
    pipe, lengths = targets[quantizer], []
    for prompt, reference in zip(PROMPTS, references[quantizer], strict=True):
        prompt_ids = encode_prompt(pipe.tokenizer, prompt)
        drafter = scripted(len(prompt_ids), reference.token_ids, 12, bad, pipe.verifier.vocab_size)
        result = drafting(pipe, drafter).generate_ids(prompt_ids, max_new_tokens=N)
        assert result.token_ids == reference.token_ids
        lengths.append((len(result.token_ids), result.stats["mean_acceptance_length"]))
    long = [accepted for n, accepted in lengths if n == N]
    assert len(long) >= 2
    assert all(accepted == 12 if bad == 0 else accepted > 3 for accepted in long)


@pytest.mark.parametrize("quantizer", ["w8a8", "none"])
def test_without_drafts_the_loop_is_plain_decoding(targets, references, quantizer):
    """The do-nothing drafter: one token a step, the same tokens."""
    result = drafting(targets[quantizer], "none").generate(PROMPTS[1], max_new_tokens=N)
    assert result.token_ids == references[quantizer][1].token_ids
    assert result.stats["steps"] == len(result.token_ids)


def test_the_full_model_as_target_says_what_transformers_says(smollm2, references):
    """``quantizer="none"`` equals ``generate(do_sample=False)``, EOS included."""
    ended = set()
    for prompt, reference in zip(PROMPTS, references["none"], strict=True):
        inputs = torch.tensor([encode_prompt(smollm2.tokenizer, prompt)])
        output = smollm2.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=N, do_sample=False
        )
        assert list(reference.token_ids) == output[0, inputs.shape[1] :].tolist()
        ended.add(reference.finish_reason)
    assert ended == {"eos", "length"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_stop_strings_end_the_output_where_transformers_ends_it(smollm2, targets, references, size):
    """Windows of the greedy text as stop strings, completed in the middle of drafts of 2, 8 and 21 tokens."""
    tokenizer, prompt_ids = smollm2.tokenizer, encode_prompt(smollm2.tokenizer, PROMPTS[1])
    token_ids = list(references["none"][1].token_ids)
    inputs = torch.tensor([prompt_ids])
    for begin in (6,):
        stop = tokenizer.decode(token_ids[begin : begin + size])
        expected = smollm2.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=24,
            do_sample=False,
            stop_strings=[stop],
            tokenizer=tokenizer,
        )[0, len(prompt_ids) :].tolist()
        assert len(expected) < 24, "the stop string was met"
        for k in (1, 7, 20):
            pipe = drafting(targets["none"], scripted(len(prompt_ids), token_ids, k))
            result = pipe.generate_ids(prompt_ids, max_new_tokens=24, stop=stop)
            assert list(result.token_ids) == expected, (stop, k)
            assert result.finish_reason == "stop"
            assert stop not in result.text
            assert tokenizer.decode(expected).startswith(result.text + stop)


@pytest.fixture(scope="module")
def text_ids(smollm2) -> list[int]:
    return smollm2.tokenizer(TEXT.replace("\n", " "))["input_ids"]


def hidden_states(verifier, text_ids: list[int], width: int, n: int = 16) -> torch.Tensor:
    """``[n, D]`` last hidden states of the last n tokens of the text, ``width`` at a time."""
    session = verifier.start(text_ids[-4 * n : -n], frozenset({"hidden:-1"}))
    rows, tokens = [], text_ids[-n:]
    for begin in range(0, n, width):
        window = tokens[begin : begin + width]
        rows.append(session.verify(Draft(window[: min(width, n - begin) - 1])).features["hidden:-1"])
        session.commit(window)
    return torch.cat(rows)


def test_hidden_states_of_the_quantized_model_are_bit_identical_for_every_width(targets, text_ids):
    """Widths 1 to 16, all in front of the output head: not one bit differs."""
    verifier = targets["w8a8"].verifier
    alone = hidden_states(verifier, text_ids, 1)
    for width in range(2, 17):
        assert torch.equal(hidden_states(verifier, text_ids, width), alone), f"width {width}"


def test_without_attention_by_rows_the_width_would_change_them(targets, text_ids, monkeypatch):
    """By more than a last bit: int8 activations turn it into whole rounding steps."""
    verifier = targets["w8a8"].verifier
    monkeypatch.setattr(causal_lm_session, "attending_by_rows", contextlib.nullcontext)
    difference = (hidden_states(verifier, text_ids, 16) - hidden_states(verifier, text_ids, 1)).abs().max()
    assert difference > 1e-3


def test_the_quantized_model_nearly_says_what_the_full_model_says(smollm2, targets, text_ids):
    """Never promised, but measured: top-1 agreement and KL divergence (in nats) on a short text."""
    inputs = torch.tensor([text_ids])
    with torch.no_grad():
        full = smollm2.model(inputs).logits[0].log_softmax(-1)
        quantized = targets["w8a8"].verifier.model(inputs).logits[0].log_softmax(-1)
    agreement = (full.argmax(-1) == quantized.argmax(-1)).float().mean()
    divergence = (full.exp() * (full - quantized)).sum(-1).mean()
    assert agreement >= 0.9
    assert 0 < divergence <= 0.03


def test_every_linear_layer_is_quantized_and_those_that_can_be_are_smoothed(targets):
    """30 times 7 linear layers; all but o_proj have an input that can be smoothed; the tied head is left alone."""
    report = targets["w8a8"].description["quantization"]
    assert report["smoothed_layers"] == 30 * 6
    assert [entry["name"] for entry in report["skipped"]] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert len(report["kernels"]) == 1
