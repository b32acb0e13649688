"""Another causal LM as the drafter: its vocabulary is compared, and the output is the target's own."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quasar import Pipeline
from quasar.checkpoints.models import LoadedModel
from quasar.drafters.model import ModelDrafter
from quasar.drafters.nested import NestedDrafter
from quasar.errors import InvalidRequestError, ModelNotFoundError
from quasar.testing.models import greedy, random_prompt, tiny
from quasar.types import Draft
from quasar.verifiers.causal_lm import CausalLMVerifier
from test_models_tiny import WatchedVerifier

N = 60
TOKENS = ("<eos>", "<unk>", *(f"w{i}" for i in range(2, 60)))
EXACT = {"max_new_tokens": N, "eos_token_id": None}

model_of = functools.cache(tiny)
"""Models are made once and never changed."""


def tokenizer_of(tokens=TOKENS, special=("<eos>",)) -> PreTrainedTokenizerFast:
    """One token a word, with ids in the order of ``tokens``; ``special`` are added tokens."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def perturbed(model, size: float):
    """A copy with noise on every matrix."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * float(parameter.std()) * size)
    return other


def pipeline(target, drafting, tokenizer=None, **options) -> Pipeline:
    """``drafting`` drafts for ``target``; both have the same tokenizer, and the cache of each is watched."""
    tokenizer = tokenizer or tokenizer_of()
    drafter = ModelDrafter(LoadedModel("small", drafting, tokenizer), **options)
    return Pipeline.from_model(target, tokenizer, quantizer="none", drafter=drafter, verifier=WatchedVerifier)


def watch_drafts(monkeypatch, pipe) -> list[Draft]:
    """What the drafter of the pipeline proposes from now on, with asserts on its cache after every step."""
    drafts, start = [], pipe.drafter.start
    caches, start_inner = [], pipe.drafter.verifier.start

    def start_watched(*arguments):
        caches.append(start_inner(*arguments))
        return caches[-1]

    def watched(prompt_ids, sampling, target):
        session, committed = start(prompt_ids, sampling, target), len(prompt_ids)
        propose, commit = session.propose, session.commit

        def proposing(max_tokens):
            drafts.append(propose(max_tokens))
            if len(drafts[-1]):  # all that is committed and drafted, but the last
                assert caches[-1].cached_length == committed + len(drafts[-1]) - 1
            return drafts[-1]

        def committing(token_ids, verification):
            nonlocal committed
            commit(token_ids, verification)
            committed += len(token_ids)

        session.propose, session.commit = proposing, committing
        return session

    monkeypatch.setattr(pipe.drafter.verifier, "start", start_watched)
    monkeypatch.setattr(pipe.drafter, "start", watched)
    return drafts


# Drafts that are right, and drafts that are not


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("same_object", [False, True])
def test_the_same_weights_are_always_right(k, same_object, monkeypatch):
    """Acceptance is exactly 1, steps are as few as there can be, and both caches are as long as what is committed."""
    target = model_of("llama")
    pipe = pipeline(target, target if same_object else copy.deepcopy(target), k=k)
    drafts = watch_drafts(monkeypatch, pipe)
    before = {name: parameter.clone() for name, parameter in target.named_parameters()}
    result = pipe.generate_ids(random_prompt(9), **EXACT)
    assert list(result.token_ids) == greedy(target, random_prompt(9), N)
    assert result.stats["accepted_tokens"] == result.stats["drafted_tokens"] > 0
    assert result.stats["steps"] == math.ceil(N / (k + 1)) == len(drafts)
    assert all(torch.equal(parameter, before[name]) for name, parameter in target.named_parameters())


@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_other_weights_are_right_some_of_the_time(k, family, monkeypatch):
    """The output is the target's; what is rejected in the middle of a draft leaves no trace in either cache."""
    target = model_of(family)
    pipe = pipeline(target, perturbed(target, 0.1), k=k)
    watch_drafts(monkeypatch, pipe)
    result = pipe.generate_ids(random_prompt(9), **EXACT)
    assert list(result.token_ids) == greedy(target, random_prompt(9), N)
    assert 0 < result.stats["accepted_tokens"] < result.stats["drafted_tokens"]


@pytest.mark.parametrize("seed", range(3))
def test_sampled_tokens_are_the_target_s_own(seed):
    """It draws with the noise that the target draws with, so that drafts of a like model are often right."""
    target = model_of("llama")
    asked = {**EXACT, "temperature": 0.8, "top_p": 0.95, "seed": seed}
    pipe = pipeline(target, perturbed(target, 0.05), k=4)
    result = pipe.generate_ids(random_prompt(9), **asked)
    assert result.token_ids == pipe.reference(random_prompt(9), **asked).token_ids
    assert result.stats["drafted_tokens"] / 4 < result.stats["accepted_tokens"] < result.stats["drafted_tokens"]


# Options


def test_the_options_of_the_spec_string_reach_the_drafter(tmp_path):
    """Also the folder it is loaded from, and the dtype; min_k, max_k default to k: a fixed length."""
    model_of("llama").save_pretrained(tmp_path)
    tokenizer_of().save_pretrained(tmp_path)
    spec = f"model:name={tmp_path},k=4,min_margin=0.25,dtype=float64"
    pipe = Pipeline.from_model(model_of("llama"), tokenizer_of(), quantizer="none", drafter=spec)
    assert isinstance(pipe.drafter, NestedDrafter)
    lengths = pipe.drafter.lengths
    assert (lengths.k, lengths.min_k, lengths.max_k, lengths.min_margin) == (4, 4, 4, 0.25)
    assert pipe.drafter.verifier.model.dtype == torch.float64
    result = pipe.generate_ids(random_prompt(9), **EXACT)
    assert list(result.token_ids) == greedy(model_of("llama"), random_prompt(9), N)
    assert pipe.description["drafter"] == spec


@pytest.mark.parametrize("k", [5, 3, None])
def test_a_draft_has_k_tokens_as_long_as_the_budget_allows(k, monkeypatch):
    """Whatever was accepted before; the default is 5."""
    target = model_of("llama")
    pipe = pipeline(target, perturbed(target, 0.1), **({} if k is None else {"k": k}))
    drafts = watch_drafts(monkeypatch, pipe)
    pipe.generate_ids(random_prompt(9), **EXACT)
    lengths = [len(draft) for draft in drafts]
    assert set(lengths[:-6]) == {k or 5}
    assert all(length <= (k or 5) for length in lengths)


def test_a_second_call_starts_from_the_configured_k(monkeypatch):
    """Drafts that adapt were shorter at the end of the first call; the next one and the options know nothing of it."""
    target = model_of("llama")
    config = copy.deepcopy(target.config.to_dict()), target.generation_config.to_dict()
    pipe = pipeline(target, tiny("llama", seed=9), k=8, min_k=1, max_k=16)
    drafts = watch_drafts(monkeypatch, pipe)
    lengths = []
    for _ in range(2):
        drafts.clear()
        pipe.generate_ids(random_prompt(9), **EXACT)
        lengths.append([len(draft) for draft in drafts])
    assert lengths[0] == lengths[1]
    assert lengths[0][0] == 8
    assert min(lengths[0][:20]) < 4
    assert (target.config.to_dict(), target.generation_config.to_dict()) == config


def test_a_model_that_is_not_there_is_refused_before_the_target_is_loaded(tmp_path):
    """As far as this machine can tell."""
    for name in (tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(ModelNotFoundError, match="there is no"):
            Pipeline.from_pretrained("acme/target-that-is-never-loaded", drafter=f"model:name={name}")
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        Pipeline.from_model(None, drafter=f"model:name={tmp_path}")


def test_without_a_target_s_model_it_does_not_draft():
    """A pipeline that is built on a verifier has no vocabulary to compare with."""
    drafter = ModelDrafter(LoadedModel("small", model_of("llama"), tokenizer_of()))
    pipe = Pipeline(CausalLMVerifier(model_of("llama")), tokenizer_of(), drafter=drafter)
    with pytest.raises(InvalidRequestError, match="no target to compare vocabularies with; make the pipeline of"):
        pipe.generate_ids([5, 6], max_new_tokens=3)


# Vocabularies that differ


PERMUTED = (*TOKENS[:7], TOKENS[8], TOKENS[7], *TOKENS[9:])
FOREIGN = {
    "permuted": (tokenizer_of(PERMUTED), "token id 7 is 'w8' to the model that drafts and 'w7' to the target"),
    "one special token": (
        tokenizer_of(("</s>", *TOKENS[1:]), special=("</s>",)),
        "token id 0 is '</s>' to the model that drafts and '<eos>' to the target",
    ),
    "one added token": (
        tokenizer_of(special=("<eos>", "<tool>")),
        "token id 60 is '<tool>' to the model that drafts and '<image>' to the target",
    ),
    "none": (None, "the model that drafts comes without a tokenizer that lists its vocabulary"),
    "no vocabulary": (object(), "the model that drafts comes without a tokenizer that lists its vocabulary"),
}


class Untouchable:
    """A model of which nobody may compute anything."""

    def __init__(self, model):
        self._model = model

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *arguments, **options):
        raise AssertionError("a forward")


@pytest.mark.parametrize(("tokenizer", "message"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("quantizer", ["none", "w8a8"])
def test_another_vocabulary_is_refused_before_the_first_forward(tokenizer, message, quantizer):
    """The first id that differs, both texts, and how to have it all the same."""
    models_of_both = [copy.deepcopy(model_of("llama")) for _ in range(2)]
    for model in models_of_both:
        model.forward = Untouchable(model)
    target = tokenizer_of(special=("<eos>", "<image>"))
    drafter = ModelDrafter(LoadedModel("small", models_of_both[0], tokenizer))
    for exact_to in ("quantized", "full"):
        choices = {"quantizer": quantizer, "exact_to": exact_to, "drafter": drafter}
        with pytest.raises(InvalidRequestError) as caught:
            Pipeline.from_model(models_of_both[1], target, **choices)
        assert message in str(caught.value)
        assert "any_vocabulary=true" in str(caught.value)


def test_a_target_without_a_tokenizer_cannot_be_compared_either():
    """The message says whose is missing."""
    drafter = ModelDrafter(LoadedModel("small", model_of("llama"), tokenizer_of()))
    with pytest.raises(InvalidRequestError, match="the model of the target comes without a tokenizer that lists"):
        Pipeline.from_model(model_of("llama"), drafter=drafter)


@pytest.mark.parametrize("tokenizer", [tokenizer for tokenizer, _ in FOREIGN.values()], ids=FOREIGN)
def test_with_any_vocabulary_the_output_is_the_target_s_all_the_same(tokenizer):
    """Only the acceptance tells: here it is that of a model whose ids mean the same after all."""
    target = model_of("llama")
    drafter = ModelDrafter(LoadedModel("small", perturbed(target, 0.1), tokenizer), any_vocabulary=True)
    for target_tokenizer in (tokenizer_of(), None):
        pipe = Pipeline.from_model(target, target_tokenizer, quantizer="none", drafter=drafter)
        result = pipe.generate_ids(random_prompt(9), **EXACT)
        assert list(result.token_ids) == greedy(target, random_prompt(9), N)
        assert 0 < result.stats["accepted_tokens"] < result.stats["drafted_tokens"]


def test_ids_that_one_tokenizer_lacks_are_no_difference():
    """Added at the end of the one or of the other, the common part alike."""
    longer = tokenizer_of(special=("<eos>", "<tool>"))
    for own, target in ((longer, tokenizer_of()), (tokenizer_of(), longer)):
        drafter = ModelDrafter(LoadedModel("small", model_of("llama"), own))
        pipe = Pipeline.from_model(model_of("llama"), target, quantizer="none", drafter=drafter)
        assert len(pipe.generate_ids([5, 6], max_new_tokens=5, eos_token_id=None).token_ids) == 5


# Vocabularies padded to another width


WIDTHS = [(72, 64), (64, 72)]


def padded_pair(target_width: int, width: int):
    """Two models of like weights, with a tokenizer of 60 entries; the narrow one has the first rows of the wide one."""
    wide = tiny("llama", vocab_size=max(target_width, width))
    narrow = tiny("llama", vocab_size=min(target_width, width))
    rows = narrow.config.vocab_size
    state = {
        name: tensor[:rows] if name in ("model.embed_tokens.weight", "lm_head.weight") else tensor
        for name, tensor in wide.state_dict().items()
    }
    narrow.load_state_dict(state)
    return (wide, perturbed(narrow, 0.05)) if target_width > width else (narrow, perturbed(wide, 0.05))


@pytest.mark.parametrize(("target_width", "width"), WIDTHS)
def test_padding_to_another_width_is_no_difference(target_width, width):
    """Greedy: the target's own tokens, among them ids that the drafter lacks, in the prompt too; many guehit."""
    target, drafting = padded_pair(target_width, width)
    ids, accepted = set(), 0
    for seed in range(6):
        prompt_ids = [*random_prompt(5, seed), target_width - 1, 7]
        result = pipeline(target, drafting, k=4).generate_ids(prompt_ids, **EXACT)
        assert list(result.token_ids) == greedy(target, prompt_ids, N)
        ids |= set(result.token_ids)
        accepted += result.stats["accepted_tokens"]
    assert accepted > 60
    assert (max(ids) >= 64) == (target_width == 72)


@pytest.mark.parametrize(("target_width", "width"), WIDTHS)
@pytest.mark.parametrize("policy", ["auto", "rejection", "block"])
def test_sampling_with_another_width(target_width, width, policy, monkeypatch):
    """Coupled: the same tokens. By probability: rows as wide as the drafter's, with nothing beyond the target's ids."""
    target, drafting = padded_pair(target_width, width)
    drafter = ModelDrafter(LoadedModel("small", drafting, tokenizer_of()), k=4)
    pipe = Pipeline.from_model(target, tokenizer_of(), quantizer="none", drafter=drafter, policy=policy)
    drafts = watch_drafts(monkeypatch, pipe)
    asked = {**EXACT, "temperature": 1.0, "seed": 3}
    result = pipe.generate_ids(random_prompt(9), **asked)
    assert result.stats["accepted_tokens"] > 10
    assert all(token_id < target_width for draft in drafts for token_id in draft.token_ids)
    if policy == "auto":
        assert result.token_ids == pipe.reference(random_prompt(9), **asked).token_ids
        assert all(draft.probs is None for draft in drafts)
        return
    for draft in filter(len, drafts):
        assert draft.probs.shape == (len(draft), width)
        assert torch.allclose(draft.probs.sum(dim=1), torch.ones(len(draft), dtype=torch.float64))
        assert not draft.probs[:, target_width:].any()


def test_a_shorter_context_ends_drafting_not_decoding():
    """GPT-2 with 16 positions drafts for one with 256."""
    target = model_of("gpt2")
    pipe = pipeline(target, tiny("gpt2", max_position_embeddings=16), k=4)
    for length in (5, 16, 30):
        result = pipe.generate_ids(random_prompt(length), **EXACT)
        assert list(result.token_ids) == greedy(target, random_prompt(length), N)
        assert (result.stats["drafted_tokens"] > 0) == (length < 16)


def test_it_drafts_for_a_quantized_copy_of_the_target_too():
    """Three models in a row: it drafts for the copy, which drafts for the full model."""
    target = model_of("llama")
    drafter = ModelDrafter(LoadedModel("small", perturbed(target, 0.1), tokenizer_of()), k=3)
    pipe = Pipeline.from_model(target, tokenizer_of(), drafter=drafter, exact_to="full", calibration=["w5 w6 w7"])
    result = pipe.generate_ids(random_prompt(9), **EXACT)
    assert list(result.token_ids) == greedy(target, random_prompt(9), N)
    assert result.stats["accepted_tokens"] > 10
