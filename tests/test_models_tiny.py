"""The whole pipeline over tiny random models of many architectures, against transformers' own greedy decoding."""

from __future__ import annotations

import copy
import functools
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

from quasar import Pipeline
from quasar.drafters.function import FunctionDrafter
from quasar.errors import InvalidRequestError, NumericalError, UnsupportedModelError
from quasar.loop.decode import speculate
from quasar.loop.decoding import Decoding
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.policies.greedy import GreedyPolicy
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing.fakes import scripted
from quasar.testing.models import FAMILIES, VOCAB_SIZE, WINDOWED, greedy, random_prompt, tiny
from quasar.types import EMPTY_DRAFT, Draft
from quasar.verifiers.causal_lm import CausalLMVerifier

N = 40
STEPS = {
    (k, bad): steps
    for bad, by_k in {0: (20, 8, 5), 1: (40, 40, 40), 3: (27, 14, 14)}.items()
    for k, steps in zip((1, 4, 7), by_k, strict=True)
}
"""Verify forwards for 40 tokens: right drafts, always wrong ones, and every third token wrong."""

VARIANTS = [(family, attention) for family, kind in FAMILIES.items() for attention in kind.attentions]

model_of = functools.cache(tiny)
"""Models are made once and never changed; a test that changes one makes its own."""


@functools.cache
def gold(family: str, attention: str, length: int) -> tuple[int, ...]:
    """Greedy output of the untouched model for the random prompt of that length."""
    return tuple(greedy(tiny(family, attention=attention), random_prompt(length), N))


class WatchedVerifier(CausalLMVerifier):
    """Asserts after every step that the cache holds all committed tokens but the last."""

    def start(self, prompt_ids, needs=frozenset()):
        session = super().start(prompt_ids, needs)
        committed = len(prompt_ids)
        plain_commit = session.commit
        assert session.cached_length + session.pending == committed - 1

        def commit(token_ids):
            nonlocal committed
            plain_commit(token_ids)
            committed += len(token_ids)
            assert session.cached_length == committed - 1

        session.commit = commit
        return session


def pipeline(model, drafter="none", **choices) -> Pipeline:
    return Pipeline.from_model(model, quantizer="none", drafter=drafter, verifier=WatchedVerifier, **choices)


def generated(model, prompt_ids, drafter="none", **settings):
    settings = {"max_new_tokens": N, "eos_token_id": None, **settings}
    return pipeline(model, drafter).generate_ids(prompt_ids, **settings)


@pytest.mark.parametrize(("family", "attention"), VARIANTS)
@pytest.mark.parametrize("bad", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 4, 7])
def test_tokens_and_step_counts_are_those_of_plain_greedy_decoding(family, attention, bad, k):
    """Whatever is drafted, the tokens are transformers' own, in exactly as many forwards as the drafts allow."""
    expected = list(gold(family, attention, 12))
    assert len(set(expected)) >= 4, "the model says nothing that a wrong cache could spoil"
    result = generated(
        model_of(family, attention=attention), random_prompt(12), scripted(12, expected, k, bad, VOCAB_SIZE)
    )
    assert list(result.token_ids) == expected
    assert result.stats["steps"] == STEPS[k, bad]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("k", [1, 4, 7])
def test_the_counts_of_right_drafts_follow_from_k(k):
    """The table of expected counts agrees with ceil(n / (k + 1))."""
    assert STEPS[k, 0] == math.ceil(N / (k + 1))


@pytest.mark.parametrize(("family", "attention"), VARIANTS)
@pytest.mark.parametrize("length", [1, 2, 20])
def test_prompts_of_one_token_and_of_many_are_decoded(family, attention, length):
    """A prompt of one token leaves nothing to cache before the first step; one of 20 fills every sliding window."""
    expected = list(gold(family, attention, length))
    result = generated(
        model_of(family, attention=attention), random_prompt(length), scripted(length, expected, 6, 3, VOCAB_SIZE)
    )
    assert list(result.token_ids) == expected


@pytest.mark.parametrize(("family", "attention"), [v for v in VARIANTS if v[0] in WINDOWED])
@pytest.mark.parametrize("length", [3, 5, 7, 8, 9])
@pytest.mark.parametrize("bad", [0, 3])
def test_rollback_is_exact_across_the_edge_of_a_sliding_window(family, attention, length, bad):
    """A prompt shorter than the window grows past it while drafts are rejected on both sides of the edge."""
    expected = list(gold(family, attention, length))
    result = generated(
        model_of(family, attention=attention), random_prompt(length), scripted(length, expected, 6, bad, VOCAB_SIZE)
    )
    assert list(result.token_ids) == expected


@pytest.mark.parametrize("family", WINDOWED)
def test_the_sliding_window_matters_to_these_models(family):
    """Without the window the output differs, so the tests above would notice a mask that forgets it."""
    wide = {"window_size": 256} if family == "gpt_neo" else {"sliding_window": 256}
    attention = FAMILIES[family].attentions[0]
    assert greedy(tiny(family, attention=attention, **wide), random_prompt(20), N) != list(gold(family, attention, 20))


@pytest.mark.parametrize(("family", "attention"), VARIANTS)
def test_the_users_model_is_left_unchanged(family, attention):
    """Configuration, attention, tensors, generation settings and mode are as before, and tensors are not copied."""
    model = tiny(family, attention=attention)
    config, settings = model.config.to_dict(), model.generation_config.to_dict()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    verifier = pipeline(model, "ngram").verifier
    pipeline(model, "ngram").generate_ids(random_prompt(5), max_new_tokens=3)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    assert model.generation_config.to_dict() == settings
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    shared = dict(verifier.model.named_parameters())
    assert all(shared[name].data_ptr() == parameter.data_ptr() for name, parameter in model.named_parameters())


def test_a_model_in_training_mode_is_verified_in_evaluation_mode():
    """Dropout must not decide what is accepted; the user's model stays in its mode."""
    model = tiny("gpt2", attn_pdrop=0.5, embd_pdrop=0.5)
    expected = greedy(model, random_prompt(6), 10)
    model.train()
    assert list(generated(model, random_prompt(6), max_new_tokens=10).token_ids) == expected
    assert model.training


@pytest.mark.parametrize("family", FAMILIES)
def test_the_declared_invariance_says_whether_attention_could_be_replaced(family):
    """No model promises more than its attention and its precision allow.

    Experts stay in floating point beside integer layers, where their last bits become whole rounding steps.
    """
    promise = "argmax" if FAMILIES[family].replaceable else "none"
    assert CausalLMVerifier(model_of(family)).invariance == promise
    assert CausalLMVerifier(tiny(family, dtype=torch.bfloat16)).invariance == "none"
    quantized = W8A8Quantizer().quantize(model_of(family)).model
    assert CausalLMVerifier(quantized).invariance == ("none" if family == "mixtral" else promise)


@pytest.mark.parametrize("index", range(16))
@pytest.mark.parametrize("as_list", [False, True], ids=["int", "list"])
def test_an_eos_in_the_middle_of_an_accepted_draft_ends_the_output(index, as_list):
    """The EOS token is in the output once, and nothing after it."""
    expected, prompt = list(gold("llama", "sdpa", 12)), random_prompt(12)
    token_id = expected[index]
    end = expected.index(token_id) + 1
    eos = [63 if token_id != 63 else 62, token_id] if as_list else token_id
    if as_list and eos[0] in expected[:end]:
        end = expected.index(eos[0]) + 1
    result = generated(model_of("llama"), prompt, scripted(12, expected, 7), eos_token_id=eos)
    assert list(result.token_ids) == expected[:end] == greedy(model_of("llama"), prompt, N, eos_token_id=eos)
    assert result.finish_reason == "eos"
    assert result.stats["emitted_tokens"] == end
    assert result.stats["accepted_tokens"] <= end


def test_the_models_own_eos_is_used_unless_a_call_says_otherwise():
    """``eos_token_id``: what the generation config says, an id, several, or none."""
    model, prompt = tiny("llama"), random_prompt(12)
    expected = list(gold("llama", "sdpa", 12))
    model.generation_config.eos_token_id = [expected[5], 1]
    result = pipeline(model, scripted(12, expected, 7)).generate_ids(prompt, max_new_tokens=N)
    assert list(result.token_ids) == greedy(model, prompt, N) == expected[: expected.index(expected[5]) + 1]
    assert list(generated(model, prompt, eos_token_id=None).token_ids) == expected


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("eos", [None, 2, [2, 3]])
@pytest.mark.parametrize("prompt", [[5, 6, 7, 8, 9, 10, 11, 7, 8], [5], [5, 5]], ids=["repeating", "one", "two"])
def test_ngram_drafts_never_exceed_the_budget(max_new_tokens, eos, prompt):
    """Exactly the tokens asked for, with and without an EOS, for prompts shorter than the n-gram too."""
    model = model_of("llama")
    result = generated(model, prompt, "ngram:k=4", max_new_tokens=max_new_tokens, eos_token_id=eos)
    assert list(result.token_ids) == greedy(model, prompt, max_new_tokens, eos_token_id=eos)


def test_ngram_drafts_are_accepted_where_the_model_repeats_itself():
    """A model that loops is decoded in fewer forwards than tokens, so the n-gram tests are not vacuous."""
    model, prompt = model_of("gpt2", seed=1), random_prompt(12)
    result = generated(model, prompt, "ngram")
    assert list(result.token_ids) == greedy(model, prompt, N)
    assert result.stats["accepted_tokens"] > 0


@pytest.mark.parametrize("drafter", ["none", "ngram:k=8", lambda token_ids, k: [5] * 20])
def test_decoding_goes_on_to_the_last_position_of_the_context(drafter):
    """Drafts near the end are cut to the positions that are left."""
    model = model_of("gpt2", max_position_embeddings=16)
    prompt = [5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6]
    result = generated(model, prompt, drafter, max_new_tokens=5)
    assert list(result.token_ids) == greedy(model, prompt, 5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_request_that_does_not_fit_the_context_is_refused_up_front(family):
    """Also where the model itself would go on without a word."""
    model = model_of(family, max_position_embeddings=16)
    with pytest.raises(InvalidRequestError, match="11 tokens and max_new_tokens=10, but the model's context is 16; at"):
        generated(model, random_prompt(11), max_new_tokens=10)
    with pytest.raises(InvalidRequestError, match="shorten the prompt"):
        generated(model, random_prompt(16), max_new_tokens=1)


@pytest.mark.parametrize(
    ("config", "model", "options", "reason"),
    [
        ("MambaConfig", "MambaForCausalLM", {}, "rolled back"),
        ("JambaConfig", "JambaForCausalLM", {}, "rolled back"),
        ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"head_dim": 16}, "rolled back"),
        ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", {}, "rolled back"),
        ("RwkvConfig", "RwkvForCausalLM", {}, "rolled back"),
        ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "rolled back"),
        ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_ff": 32}, "encoder-decoder"),
        ("BartConfig", "BartForConditionalGeneration", {"d_model": 32}, "encoder-decoder"),
        ("GPT2Config", "GPT2Model", {"n_embd": 64, "n_layer": 2}, "does not generate text"),
        ("LlamaConfig", "LlamaModel", {}, "does not generate text"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(("LM", "Model", "ation")) else "",
)
def test_a_model_that_cannot_be_verified_is_refused_by_name_at_construction(config, model, options, reason):
    """Recurrent, hybrid, encoder-decoder and headless models: some would run and give wrong tokens without an error."""
    common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    unsupported = getattr(transformers, model)(
        getattr(transformers, config)(**common, num_attention_heads=4, **options)
    )
    with pytest.raises(UnsupportedModelError, match=rf"(?s){model}.*{reason}"):
        Pipeline.from_model(unsupported, quantizer="none")


@pytest.mark.parametrize("length", [1, 2, 100])
def test_the_output_head_never_sees_more_positions_than_are_judged(length):
    """One row for the prompt, k+1 for each verification, whatever the length of the prompt."""
    expected = list(gold("llama", "sdpa", 12))
    pipe = pipeline(tiny("llama"), lambda token_ids, k: expected[: min(k, len(token_ids) % 4)])
    rows = []
    pipe.verifier.model.lm_head.register_forward_hook(lambda _module, args, _output: rows.append(args[0].shape[1]))
    result = pipe.generate_ids(random_prompt(length), max_new_tokens=12, eos_token_id=None)
    verified = rows[1:] if length > 1 else rows
    assert rows[: len(rows) - len(verified)] == [1] * (length > 1)
    assert len(verified) == result.stats["steps"]
    assert sum(verified) == result.stats["drafted_tokens"] + result.stats["steps"]
    assert max(verified) == 4


@pytest.mark.parametrize(("family", "attention"), VARIANTS)
def test_a_wrong_draft_rolled_back_leaves_no_trace(family, attention):
    """Verifying a wrong draft, rolling it back and verifying the right one equals a forward from scratch."""
    model = model_of(family, attention=attention)
    expected, prompt = list(gold(family, attention, 20)), random_prompt(20)
    session = CausalLMVerifier(model).start(prompt)
    session.verify(Draft([(token_id + 1) % VOCAB_SIZE for token_id in expected[:9]]))
    session.commit(expected[:1])
    session.verify(Draft([*expected[1:4], 7, 8, 9]))
    session.commit(expected[1:5])
    logits = session.verify(Draft(expected[5:9])).logits
    with torch.no_grad():
        scratch = model(torch.tensor([[*prompt, *expected[:9]]]), use_cache=False).logits[0, -5:]
    torch.testing.assert_close(logits, scratch, rtol=0, atol=5e-5)
    assert logits.argmax(-1).tolist() == expected[5:10]


@pytest.mark.parametrize(("family", "attention"), VARIANTS)
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_token_never_changes_what_the_target_says_before_it(family, attention, k):
    """Another last draft token leaves all earlier rows of logits bit-equal: the causal mask ends where it should.

    Experts multiply the rows that were sent to them in one product, so a mixture of experts is equal to rounding only.
    """
    expected, prompt = list(gold(family, attention, 20)), random_prompt(20)
    session = CausalLMVerifier(model_of(family, attention=attention)).start(prompt)
    first = session.verify(Draft(expected[:k])).logits
    other = session.verify(Draft([*expected[: k - 1], (expected[k - 1] + 1) % VOCAB_SIZE])).logits
    tolerance = 5e-5 if family == "mixtral" else 0
    torch.testing.assert_close(first[:k], other[:k], rtol=0, atol=tolerance)
    assert not torch.equal(first[k], other[k])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cached", [0, 30])
def test_several_positions_at_once_equal_one_at_a_time(family, cached):
    """Widths 1 to 9, on an empty cache and on a filled one, agree to rounding and in their argmax."""
    model, prompt = model_of(family), random_prompt(cached + 1)
    verifier = CausalLMVerifier(model)
    continuation = greedy(model, prompt, 9)
    single = verifier.start(prompt)
    rows = []
    for token_id in continuation:
        rows.append(single.verify(EMPTY_DRAFT).logits[0])
        single.commit([token_id])
    alone = torch.stack(rows)
    for k in range(1, 9):
        logits = verifier.start(prompt).verify(Draft(continuation[:k])).logits
        torch.testing.assert_close(logits, alone[: k + 1], rtol=0, atol=5e-5)
        assert torch.equal(logits.argmax(-1), alone[: k + 1].argmax(-1))


class NeedyDrafter(FunctionDrafter):
    """Notes the shapes of what it is shown."""

    def __init__(self, needs, expected):
        super().__init__(scripted(12, expected, 4, 3, VOCAB_SIZE))
        self.needs, self.seen = needs, []

    def start(self, prompt_ids, sampling, target):
        self.target = target
        session = super().start(prompt_ids, sampling, target)
        plain_commit, plain_propose = session.commit, session.propose

        def propose(max_tokens):
            self.width = len(plain_propose(max_tokens)) + 1
            return plain_propose(max_tokens)

        def commit(token_ids, verification):
            hidden = verification.features.get("hidden:-1")
            self.seen.append((self.width, tuple(verification.logits.shape), hidden))
            plain_commit(token_ids, verification)

        session.propose, session.commit = propose, commit
        return session


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_gets_the_hidden_states_that_it_needs(family):
    """``[k+1, D]`` of the verified positions; with the output head they give the logits."""
    model, expected = model_of(family), list(gold(family, FAMILIES[family].attentions[0], 12))
    drafter = NeedyDrafter(frozenset({"hidden:-1"}), expected)
    assert list(generated(model, random_prompt(12), drafter).token_ids) == expected
    assert [logits for _, logits, _ in drafter.seen] == [(width, VOCAB_SIZE) for width, _, _ in drafter.seen]
    assert [tuple(hidden.shape) for *_, hidden in drafter.seen] == [(width, 64) for width, _, _ in drafter.seen]
    assert model.lm_head(drafter.seen[-1][2][-1]).argmax() == expected[-1]


def test_hidden_states_are_not_computed_for_a_drafter_that_does_not_ask():
    """Needs are data, asked for once at the start."""
    drafter = NeedyDrafter(frozenset(), list(gold("llama", "sdpa", 12)))
    generated(model_of("llama"), random_prompt(12), drafter)
    assert all(hidden is None for *_, hidden in drafter.seen)


def test_a_need_that_the_verifier_cannot_meet_is_refused():
    """The message names the need and what there is."""
    with pytest.raises(UnsupportedModelError, match=r"'attentions'; causal_lm has 'hidden:-1'.*'hidden:2'"):
        CausalLMVerifier(model_of("llama")).start(random_prompt(12), frozenset({"attentions"}))


@pytest.mark.parametrize("prompt", [[], [VOCAB_SIZE], [-1, 3]], ids=["empty", "too high", "negative"])
def test_a_prompt_that_is_no_sequence_of_the_vocabulary_is_refused(prompt):
    """An id outside the vocabulary would be an index error deep in the model."""
    with pytest.raises(InvalidRequestError, match="prompt"):
        generated(model_of("llama"), prompt)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_weights_that_are_not_finite_give_an_error_that_names_verifier_and_position(drafter):
    """Never a silent argmax of NaN."""
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(NumericalError, match=r"WatchedVerifier returned logits .* nan in row 0"):
        generated(model, random_prompt(5), drafter)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_draft_token_whose_row_is_not_finite_spoils_nothing(attention):
    """A token whose embedding is NaN, drafted third and rejected: the output is that of plain decoding."""
    model, prompt = tiny("llama", attention=attention), random_prompt(12)
    expected = list(gold("llama", attention, 12))
    poison = next(token_id for token_id in range(VOCAB_SIZE) if token_id not in {*prompt, *expected})
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    result = generated(model, prompt, lambda token_ids, k: [*expected[len(token_ids) - 12 :][:2], poison, 5])
    assert list(result.token_ids) == expected


def test_float32_output_of_twenty_prompts_equals_plain_decoding():
    """Drafts of five right tokens, 40 tokens a prompt: not one difference."""
    model = model_of("llama", seed=3)
    for seed in range(20):
        prompt = random_prompt(12, seed=seed)
        expected = greedy(model, prompt, N)
        assert list(generated(model, prompt, scripted(12, expected, 5)).token_ids) == expected


def test_bfloat16_output_differs_at_most_where_two_logits_are_within_rounding():
    """The first difference, if there is one, falls on a near-tie; the guarantee says that it may."""
    model = model_of("llama", seed=3, dtype=torch.bfloat16)
    for seed in range(20):
        prompt = random_prompt(12, seed=seed)
        expected = greedy(model, prompt, N)
        result = generated(model, prompt, scripted(12, expected, 5))
        assert "except where its best choices lie close together" in result.guarantee
        differing = [i for i, pair in enumerate(zip(result.token_ids, expected, strict=True)) if pair[0] != pair[1]]
        if differing:
            context = torch.tensor([[*prompt, *expected[: differing[0]]]])
            with torch.no_grad():
                best = model(context).logits[0, -1].float().topk(2).values
            assert best[0] - best[1] <= 8 * 2**-8 * best[0].abs()


def test_interleaved_sequences_over_one_verifier_do_not_touch_each_other():
    """Nothing of a sequence lives on the strategies: two decodes, step by step in turn, equal their solo runs."""
    model = model_of("mistral_window")
    verifier = WatchedVerifier(model)
    prompts = [random_prompt(length, seed=length) for length in (4, 12, 9)]
    expected = [greedy(model, prompt, N) for prompt in prompts]
    running = [
        speculate(
            Decoding(
                prompt,
                drafter=FunctionDrafter(scripted(len(prompt), target, 5, 3, VOCAB_SIZE)),
                verifier=verifier,
                policy=GreedyPolicy(),
                sampling=Sampling(),
                stopping=Stopping(N),
                processing=Processing(prompt),
                stats=DecodeStats(),
            )
        )
        for prompt, target in zip(prompts, expected, strict=True)
    ]
    outputs = [[] for _ in prompts]
    for _ in range(N):
        for output, steps in zip(outputs, running, strict=True):
            for step in [next(steps, None)]:
                output.extend(step.emission.token_ids if step else ())
    assert outputs == expected


def test_threads_over_one_pipeline_do_not_touch_each_other():
    """Four generations at once equal their solo runs."""
    model = model_of("llama")
    pipe = pipeline(model, "ngram")
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 12, 30)]
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda prompt: pipe.generate_ids(prompt, max_new_tokens=N, eos_token_id=None), prompts * 3)
        )
    assert [list(result.token_ids) for result in results] == [greedy(model, prompt, N) for prompt in prompts] * 3


def test_a_verification_that_was_never_judged_is_forgotten():
    """Verifying twice without a commit gives the same logits twice."""
    session = CausalLMVerifier(model_of("gemma3")).start(random_prompt(20))
    draft = Draft([5, 6, 7])
    assert torch.equal(session.verify(draft).logits, session.verify(draft).logits)


def test_logits_are_the_callers_to_keep():
    """A later step does not change what an earlier one returned."""
    session = CausalLMVerifier(model_of("llama")).start(random_prompt(5))
    kept = session.verify(Draft([5, 6])).logits
    copied = copy.deepcopy(kept)
    session.commit([5, 9])
    session.verify(Draft([8, 7]))
    assert torch.equal(kept, copied)
