"""What a user holds: prompts and settings in, text and tokens out, the same by every way of asking."""

from __future__ import annotations

import gc
import json
import random
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from transformers import (
    EosTokenCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from quasar.drafters.function import FunctionDrafter
from quasar.drafters.nested import NestedDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import InvalidRequestError, PluginError
from quasar.loop.sampling import Sampling
from quasar.pipeline.pipeline import Pipeline
from quasar.testing.fakes import TableLM, scripted
from quasar.types import Verdict
from toys import CHAT_TEMPLATE, WORDS, table_lm, tiny_llama, toy_pipeline, word_tokenizer

PROMPT = "the cat sat"
PROMPT_IDS = [WORDS.index(word) for word in PROMPT.split()]
DRAFTERS = {
    "ngram": "ngram:k=4,max_n=2",
    "none": "none",
    "oracle": scripted(len(PROMPT_IDS), table_lm().greedy(PROMPT_IDS, 200), k=6),
    "mostly right": scripted(len(PROMPT_IDS), table_lm().greedy(PROMPT_IDS, 200), k=6, bad=3, vocab_size=len(WORDS)),
    "wrong": scripted(len(PROMPT_IDS), table_lm().greedy(PROMPT_IDS, 200), k=6, bad=1, vocab_size=len(WORDS)),
}
EXPECTED = table_lm().greedy(PROMPT_IDS, 40)
NAN, INF = float("nan"), float("inf")


STOPS = st.sampled_from(["says", "日本 é", "er cat u", " ", "answer moon says cat", "zzz"])


def content(result):
    """What a result says, without counts and seconds."""
    return result.text, result.token_ids, result.finish_reason


def counted(result):
    """The same and what it took: a drafter that mixes sequences up changes no token, but guesses worse."""
    names = ("steps", "drafted_tokens", "accepted_tokens", "acceptance_by_position")
    return content(result), [result.stats[name] for name in names]


def unchanged(input_ids, scores):
    """A logits processor that does nothing."""
    return scores


def forbid(*token_ids):
    """A logits processor under which these tokens are never said."""

    def processor(input_ids, scores):
        scores[:, list(token_ids)] = -INF
        return scores

    return processor


def text_of(token_ids):
    """What the words say; special ones say nothing."""
    return " ".join(WORDS[token_id] for token_id in token_ids if WORDS[token_id] not in ("<eos>", "<unk>"))


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_every_way_of_asking_gives_the_target_s_own_tokens(drafter):
    """generate, generate_ids, stream and reference agree with greedy decoding by hand, whatever the drafter."""
    pipe = toy_pipeline(drafter=drafter)
    result = pipe.generate(PROMPT, max_new_tokens=40)
    assert content(result) == (text_of(EXPECTED), tuple(EXPECTED), "length")
    stream = pipe.stream(PROMPT, max_new_tokens=40)
    list(stream)
    for other in (
        pipe.generate_ids(PROMPT_IDS, max_new_tokens=40),
        stream.result,
        pipe.reference(PROMPT, max_new_tokens=40),
        pipe.reference(PROMPT_IDS, max_new_tokens=40),
        pipe.reference(torch.tensor([PROMPT_IDS]), max_new_tokens=40),
    ):
        assert content(other) == content(result)


@given(
    st.sampled_from(list(DRAFTERS)),
    st.integers(1, 30),
    st.lists(STOPS, max_size=3),
    st.none() | st.sampled_from(EXPECTED),
)
def test_stops_end_every_way_of_asking_alike(drafter, max_new_tokens, stop, eos):
    """Budget, stop strings and EOS end speculative output where they end plain output."""
    settings = {"max_new_tokens": max_new_tokens, "stop": stop, "eos_token_id": eos}
    pipe = toy_pipeline(drafter=DRAFTERS[drafter])
    result = pipe.generate(PROMPT, **settings)
    event(result.finish_reason)
    assert content(result) == content(pipe.reference(PROMPT, **settings))
    assert len(result.token_ids) == max_new_tokens or result.finish_reason != "length"


@given(st.sampled_from(list(DRAFTERS)), st.integers(1, 30), st.lists(STOPS, max_size=2))
def test_chunks_add_up_to_the_result(drafter, max_new_tokens, stop):
    """Concatenated texts and tokens are those of the result; every chunk brings at least one token."""
    stream = toy_pipeline(drafter=DRAFTERS[drafter]).stream(PROMPT, max_new_tokens=max_new_tokens, stop=stop)
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == stream.result.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == stream.result.token_ids
    assert all(chunk.token_ids for chunk in chunks)
    assert not any(string in stream.result.text for string in stop)


def test_a_stream_has_no_result_before_its_end():
    """Half an output is never mistaken for a whole one."""
    stream = toy_pipeline().stream(PROMPT, max_new_tokens=3)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="has not ended; iterate over one to its end first"):
            _ = stream.result
        next(stream)
    list(stream)
    assert len(stream.result.token_ids) == 3
    assert list(stream) == []


def test_a_pipeline_without_a_tokenizer_takes_and_gives_ids():
    """Text is empty then, and what needs text is refused."""
    pipe = Pipeline(table_lm())
    result = pipe.generate_ids(PROMPT_IDS, max_new_tokens=5)
    assert (result.text, result.token_ids) == ("", tuple(EXPECTED[:5]))
    with pytest.raises(InvalidRequestError, match="no tokenizer to encode a text with; use generate_ids"):
        pipe.generate(PROMPT)
    with pytest.raises(InvalidRequestError, match=r"stop=\['x'\] needs a tokenizer, and there is none"):
        pipe.generate_ids(PROMPT_IDS, stop="x")


class Uncopyable:
    """A logits processor that no position can have a copy of."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores):
        return scores

    def __repr__(self):
        return "Uncopyable()"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 5}, "there is no setting 'max_tokens'. Did you mean 'max_new_tokens'? Settings: max_new"),
        ({"beams": 5}, "there is no setting 'beams'. Settings: max_new_tokens, temperature, top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: give an integer of at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1: give an integer of at least 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens=2.0: give an integer of at least 1"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5': give an integer of at least 1"),
        ({"max_new_tokens": True}, "max_new_tokens=True: give an integer of at least 1"),
        ({"max_new_tokens": None}, "max_new_tokens=None: give an integer of at least 1"),
        ({"temperature": -1}, "temperature=-1: give a number of at least 0"),
        ({"temperature": NAN}, "temperature=nan: give a number of at least 0"),
        ({"temperature": INF}, "temperature=inf: give a number of at least 0"),
        ({"temperature": "hot"}, "temperature='hot': give a number of at least 0"),
        ({"temperature": False}, "temperature=False: give a number of at least 0"),
        ({"top_k": 0}, "top_k=0: give an integer of at least 1, or None"),
        ({"top_k": 2.5}, "top_k=2.5: give an integer of at least 1, or None"),
        ({"top_k": True}, "top_k=True: give an integer of at least 1, or None"),
        ({"top_p": 0}, "top_p=0: give a number above 0 and up to 1, or None"),
        ({"top_p": 1.5}, "top_p=1.5: give a number above 0 and up to 1, or None"),
        ({"top_p": NAN}, "top_p=nan: give a number above 0 and up to 1, or None"),
        ({"min_p": -0.1}, "min_p=-0.1: give a number from 0 to 1, or None"),
        ({"min_p": 1.5}, "min_p=1.5: give a number from 0 to 1, or None"),
        ({"min_p": NAN}, "min_p=nan: give a number from 0 to 1, or None"),
        ({"min_p": True}, "min_p=True: give a number from 0 to 1, or None"),
        ({"min_p": "0.1"}, "min_p='0.1': give a number from 0 to 1, or None"),
        ({"logprobs": -1}, "logprobs=-1: give an integer of at least 0, or None"),
        ({"logprobs": 2.0}, "logprobs=2.0: give an integer of at least 0, or None"),
        ({"logprobs": True}, "logprobs=True: give an integer of at least 0, or None"),
        ({"logits_processors": 5}, "logits processor 5 is no function of (input_ids, scores)"),
        ({"logits_processors": [None]}, "logits processor None is no function of (input_ids, scores)"),
        ({"logits_processors": [Uncopyable()]}, "logits processor Uncopyable has a state that cannot be copied"),
        ({"seed": 1.5}, "seed=1.5: give an integer"),
        ({"seed": None}, "seed=None: give an integer"),
        ({"stop": ""}, "stop=['']: each stop must be a non-empty string"),
        ({"stop": ["ok", ""]}, "stop=['ok', '']: each stop must be a non-empty string"),
        ({"stop": [5]}, "stop=[5]: each stop must be a non-empty string"),
        ({"stop": 5}, "stop=[5]: each stop must be a non-empty string"),
        ({"stopping_criteria": 5}, "stopping_criteria: 5 is not callable; give functions of the list of new tokens"),
        ({"stopping_criteria": [None]}, "stopping_criteria: None is not callable"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': give an integer, several, None for none, or 'model'"),
        ({"eos_token_id": 2.0}, "eos_token_id=2.0: give an integer, several"),
        ({"eos_token_id": True}, "eos_token_id=True: give an integer, several"),
        ({"eos_token_id": [2, None]}, "eos_token_id=[2, None]: give an integer, several"),
        ({"eos_token_id": torch.tensor([2.0])}, "eos_token_id=tensor([2.]): give an integer, several"),
        ({"skip_special_tokens": 1}, "skip_special_tokens=1: give true or false"),
        ({"raw": "yes"}, "raw='yes': give true or false"),
        ({"tools": "search"}, "tools='search': give a list of JSON schemas or functions, or None"),
        ({"template_options": 5}, "template_options=5: give a mapping from names to values"),
        ({"template_options": {"tokenize": True}}, "template_options: 'tokenize' is no variable of a chat template"),
        ({"tools": [{}], "raw": True}, "tools go into the chat template, and raw=True leaves that out"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_honoured_is_refused_before_anything_runs(settings, message):
    """Name, value and what would do; by every way of asking, and before the target is started."""
    lm = table_lm(max_length=1000)
    pipe = Pipeline(lm, word_tokenizer())
    for ask in (pipe.generate, pipe.stream, pipe.reference):
        with pytest.raises(InvalidRequestError) as caught:
            ask(PROMPT, **settings)
        assert message in str(caught.value)
    with pytest.raises(InvalidRequestError):
        pipe.generate_ids(PROMPT_IDS, **settings)
    assert lm.sessions == []


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 1},
        {"min_p": 0},
        {"min_p": 1},
        {"seed": 7},
        {"seed": -(2**70)},
        {"logprobs": 3},
        {"logits_processors": ()},
        {"logits_processors": unchanged},
        {
            "top_k": None,
            "top_p": None,
            "min_p": None,
            "stop": None,
            "stopping_criteria": None,
            "eos_token_id": None,
            "logits_processors": None,
            "logprobs": None,
        },
        {"eos_token_id": []},
        {"stop": ()},
        {"raw": True},
    ],
    ids=lambda settings: str(settings).replace(str(unchanged), "unchanged"),
)
def test_settings_without_effect_on_greedy_output_are_accepted(settings):
    """They change nothing, and None means none."""
    assert toy_pipeline().generate(PROMPT, max_new_tokens=9, **settings).token_ids == tuple(EXPECTED[:9])


@pytest.mark.parametrize(
    ("prompt", "template", "raw", "encoded"),
    [
        ("the cat", None, False, "the cat"),
        ("the cat", None, True, "the cat"),
        ("the cat", CHAT_TEMPLATE, False, "user says the cat answer"),
        ("the cat", CHAT_TEMPLATE, True, "the cat"),
        ([{"role": "user", "content": "the cat"}], CHAT_TEMPLATE, False, "user says the cat answer"),
        ([{"role": "user", "content": "the cat"}], CHAT_TEMPLATE, True, "user says the cat answer"),
        (
            ({"role": "system", "content": "the cat"}, {"role": "user", "content": "ran"}),
            CHAT_TEMPLATE,
            False,
            "system says the cat user says ran answer",
        ),
    ],
)
def test_a_text_or_messages_become_the_model_s_prompt(prompt, template, raw, encoded):
    """A text goes through the chat template unless it is raw or there is none; messages always do."""
    pipe = toy_pipeline(chat_template=template)
    token_ids = word_tokenizer()(encoded)["input_ids"]
    expected = pipe.generate_ids(token_ids, max_new_tokens=6)
    assert content(pipe.generate(prompt, max_new_tokens=6, raw=raw)) == content(expected)
    assert content(pipe.reference(prompt, max_new_tokens=6, raw=raw)) == content(expected)


@pytest.mark.parametrize(
    ("prompt", "template", "message"),
    [
        (["the cat", "the dog"], None, "prompt ['the cat', 'the dog'] is neither a text nor a list of messages"),
        (["the cat", "the dog"], CHAT_TEMPLATE, "several prompts are decoded by several calls"),
        ([], CHAT_TEMPLATE, "prompt [] is neither a text nor a list of messages {'role': …, 'content': …}"),
        ([{"role": "user"}], CHAT_TEMPLATE, "prompt [{'role': 'user'}] is neither a text nor a list of messages"),
        ({"role": "user", "content": "x"}, CHAT_TEMPLATE, "is neither a text nor a list of messages"),
        (None, None, "prompt None is neither a text nor a list of messages"),
        (torch.tensor([1, 2]), None, "prompt tensor([1, 2]) is neither a text nor a list of messages"),
        ([1] * 500, None, "…"),
        (
            [{"role": "user", "content": "x"}],
            None,
            "messages need a chat template, and this model's",
        ),
        ("", None, "the prompt has no tokens; give at least one"),
        (
            "the \udcff",
            None,
            "the prompt holds '\\udcff', half a character: it was read with",
        ),
        ("the \udcff", CHAT_TEMPLATE, "half a character"),
    ],
)
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(prompt, template, message):
    """With what it is, cut to one line, and what would do."""
    with pytest.raises(InvalidRequestError) as caught:
        toy_pipeline(chat_template=template).generate(prompt)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "prompt_ids",
    [
        PROMPT_IDS,
        tuple(PROMPT_IDS),
        iter(PROMPT_IDS),
        torch.tensor(PROMPT_IDS),
        torch.tensor([PROMPT_IDS], dtype=torch.int32),
        torch.tensor([PROMPT_IDS]).numpy(),
        [PROMPT_IDS],
    ],
    ids=["list", "tuple", "iterator", "[T]", "[1, T]", "array", "nested"],
)
def test_token_ids_come_as_a_sequence_or_a_tensor(prompt_ids):
    """One sequence, with or without a batch dimension of one."""
    assert toy_pipeline().generate_ids(prompt_ids, max_new_tokens=9).token_ids == tuple(EXPECTED[:9])


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int64), "got a batch of 2 prompts; Quasar decodes one sequence a call"),
        ([[1, 2], [3]], "got a batch of 2 prompts"),
        (torch.ones(1, 1, 3, dtype=torch.int64), "give at least one integer token id"),
        ([], "prompt_ids []: give at least one integer token id, in a sequence or in an integer tensor [T] or [1, T]"),
        (torch.ones(1, 0, dtype=torch.int64), "give at least one integer token id"),
        (torch.tensor([1.0, 2.0]), "prompt_ids tensor([1., 2.]): give at least one integer token id"),
        (torch.tensor(5), "prompt_ids tensor(5): give at least one integer token id"),
        (5, "prompt_ids 5: give at least one integer token id"),
        (None, "prompt_ids None: give at least one integer token id"),
        ([1, True], "prompt_ids [1, True]: give at least one integer token id"),
        ("the cat", "prompt_ids 'the cat': give at least one integer token id"),
        ({"input_ids": [1]}, "prompt_ids {'input_ids': [1]}: give at least one integer token id"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_anything_else_for_token_ids_is_refused_before_a_forward(prompt_ids, message):
    """A batch above all: it is said, not silently flattened or cut to its first row."""
    lm = table_lm()
    with pytest.raises(InvalidRequestError) as caught:
        Pipeline(lm).generate_ids(prompt_ids)
    assert message in str(caught.value)
    assert lm.sessions == []


@pytest.mark.parametrize(
    ("max_new_tokens", "message"),
    [
        (7, None),
        (8, "the prompt has 3 tokens and max_new_tokens=8, but the model's context is 10; at most 7 new tokens fit"),
        (10**9, "at most 7 new tokens fit"),
    ],
)
def test_prompt_and_budget_must_fit_the_context(max_new_tokens, message):
    """Up to the last position; beyond it nothing runs, and the message says how much would fit."""
    lm = table_lm(max_length=10)
    pipe = Pipeline(lm, drafter=DRAFTERS["oracle"])
    if message is None:
        assert pipe.generate_ids(PROMPT_IDS, max_new_tokens=max_new_tokens).token_ids == tuple(EXPECTED[:7])
        return
    with pytest.raises(InvalidRequestError) as caught:
        pipe.generate_ids(PROMPT_IDS, max_new_tokens=max_new_tokens)
    assert message in str(caught.value)
    assert lm.sessions == []


def test_a_prompt_that_fills_the_context_is_told_to_be_shortened():
    """There is no budget that would fit."""
    with pytest.raises(InvalidRequestError, match="context is 3; shorten the prompt"):
        Pipeline(table_lm(max_length=3)).generate_ids(PROMPT_IDS, max_new_tokens=1)


def test_the_model_s_eos_holds_unless_a_call_says_otherwise():
    """EOS is emitted as a token and not as text; another one, or none, can be asked for."""
    eos = EXPECTED[9]
    cut = EXPECTED.index(eos) + 1
    pipe = toy_pipeline(eos_token_ids=[eos], drafter=DRAFTERS["oracle"])
    assert pipe.generate(PROMPT, max_new_tokens=40).token_ids == tuple(EXPECTED[:cut])
    assert pipe.generate(PROMPT, max_new_tokens=40).finish_reason == "eos"
    assert pipe.generate(PROMPT, max_new_tokens=40, eos_token_id=None).token_ids == tuple(EXPECTED)
    other = pipe.generate(PROMPT, max_new_tokens=40, eos_token_id={EXPECTED[3]})
    assert other.token_ids == tuple(EXPECTED[: EXPECTED.index(EXPECTED[3]) + 1])
    assert pipe.generate(PROMPT, max_new_tokens=40).finish_reason == "eos"


@pytest.mark.parametrize(
    "form",
    [
        int,
        np.int64,
        torch.tensor,
        lambda eos: [np.int32(eos)],
        lambda eos: torch.tensor([eos]),
        lambda eos: torch.tensor([[eos, eos]]),
        lambda eos: np.array(eos),
        lambda eos: {eos},
        lambda eos: [torch.tensor(eos)],
    ],
)
def test_eos_comes_in_any_form_that_people_have(form):
    """As a setting, from the pipeline, and from a model's generation configuration: the same end."""
    eos = EXPECTED[9]
    cut = tuple(EXPECTED[: EXPECTED.index(eos) + 1])
    assert toy_pipeline().generate(PROMPT, max_new_tokens=40, eos_token_id=form(eos)).token_ids == cut
    assert toy_pipeline(eos_token_ids=form(eos)).generate(PROMPT, max_new_tokens=40).token_ids == cut
    model = tiny_llama()
    free = Pipeline.from_model(model, quantizer="none").generate_ids([7, 8, 9], max_new_tokens=20, eos_token_id=None)
    model.generation_config.eos_token_id = form(free.token_ids[6])
    result = Pipeline.from_model(model, quantizer="none").generate_ids([7, 8, 9], max_new_tokens=20, min_new_tokens=2)
    assert result.finish_reason == "eos"
    assert len(result.token_ids) <= 7


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({"max_new_tokens": np.int64(4)}, {"max_new_tokens": 4}),
        ({"max_new_tokens": torch.tensor(4)}, {"max_new_tokens": 4}),
        ({"temperature": np.float32(0.5), "seed": np.int32(3)}, {"temperature": 0.5, "seed": 3}),
        ({"temperature": np.array(40.0), "top_k": np.uint8(3)}, {"temperature": 40.0, "top_k": 3}),
        ({"temperature": np.float64(40), "top_p": np.float16(0.5)}, {"temperature": 40, "top_p": 0.5}),
        ({"temperature": 40, "min_p": np.float32(0.25)}, {"temperature": 40, "min_p": 0.25}),
        ({"repetition_penalty": np.float32(1.5)}, {"repetition_penalty": 1.5}),
        ({"no_repeat_ngram_size": np.int64(2), "min_new_tokens": np.int16(2)}, {"no_repeat_ngram_size": 2}),
        ({"logprobs": np.int64(2)}, {"logprobs": 2}),
    ],
    ids=str,
)
def test_numbers_of_numpy_are_numbers(settings, plain):
    """They mean what Python's own mean."""
    pipe = toy_pipeline()
    rest = {"max_new_tokens": 9}
    assert content(pipe.generate(PROMPT, **{**rest, **settings})) == content(pipe.generate(PROMPT, **{**rest, **plain}))


@pytest.mark.parametrize(
    "value", [np.bool_(True), np.array([4, 5]), np.float64(4.5), torch.tensor([1.0, 2.0])], ids=str
)
def test_what_only_looks_like_a_number_is_refused(value):
    with pytest.raises(InvalidRequestError, match=r"max_new_tokens=.*: give an integer of at least 1"):
        toy_pipeline().generate(PROMPT, max_new_tokens=value)


@pytest.mark.parametrize("prompt", [5, None, 2.5, b"the cat", {"role": "user", "content": "x"}], ids=str)
def test_a_reference_of_anything_else_is_refused(prompt):
    """With what it is."""
    with pytest.raises(InvalidRequestError, match="is neither a text, nor a list of messages, nor token ids"):
        toy_pipeline().reference(prompt)


def test_the_policy_greedy_refuses_to_sample_before_the_target_is_started():
    lm = table_lm()
    with pytest.raises(InvalidRequestError, match=r"temperature=0.5, but the policy 'greedy' never samples"):
        Pipeline(lm, policy="greedy").generate_ids(PROMPT_IDS, temperature=0.5)
    assert lm.sessions == []


def test_a_closed_generation_lets_go_of_its_sequence():
    """Its session is gone, it gives no chunk any more, and it never passes for a whole output."""
    pipe = toy_pipeline()
    with pipe.stream(PROMPT, max_new_tokens=20) as stream:
        next(stream)
        session = weakref.ref(pipe.verifier.sessions.pop())
    gc.collect()
    assert session() is None
    for ask in (lambda: next(stream), lambda: stream.result, stream.run):
        with pytest.raises(InvalidRequestError, match="the generation was closed before its end"):
            ask()
    stream.close()


def test_a_generation_that_failed_never_passes_for_a_whole_output():
    """Its error is raised once; afterwards it says that there was one."""

    def fail(token_ids):
        raise ZeroDivisionError

    stream = toy_pipeline().stream(PROMPT, max_new_tokens=9, stopping_criteria=fail)
    with pytest.raises(ZeroDivisionError):
        list(stream)
    for ask in (lambda: next(stream), lambda: stream.result):
        with pytest.raises(InvalidRequestError, match="the generation ended with ZeroDivisionError; "):
            ask()


def test_closing_after_the_end_changes_nothing():
    stream = toy_pipeline().stream(PROMPT, max_new_tokens=5)
    list(stream)
    stream.close()
    assert stream.result.token_ids == tuple(EXPECTED[:5])
    assert list(stream) == []


def test_a_second_thread_in_a_generation_is_told_so():
    """One line, and the first thread goes on as if nothing had been."""
    inside, leave = threading.Event(), threading.Event()

    def wait(token_ids):
        inside.set()
        assert leave.wait(30)
        return False

    stream = toy_pipeline().stream(PROMPT, max_new_tokens=5, stopping_criteria=wait)
    first = threading.Thread(target=stream.run)
    first.start()
    assert inside.wait(30)
    for ask in (lambda: next(stream), stream.close):
        with pytest.raises(InvalidRequestError, match="another thread is in this generation; let one thread at a time"):
            ask()
    leave.set()
    first.join()
    assert stream.result.token_ids == tuple(EXPECTED[:5])


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_settings_do_not_leak_into_later_calls(drafter):
    """Whatever one call asked for, the next one without it gives what a fresh pipeline gives."""
    pipe = toy_pipeline(drafter=drafter)
    fresh = counted(toy_pipeline(drafter=drafter).generate(PROMPT, max_new_tokens=40))
    for settings in (
        {"max_new_tokens": 3},
        {"max_new_tokens": 20, "stop": [WORDS[EXPECTED[4]]]},
        {"max_new_tokens": 20, "eos_token_id": EXPECTED[2]},
        {"max_new_tokens": 20, "stopping_criteria": [lambda token_ids: len(token_ids) == 5]},
        {"max_new_tokens": 10, "temperature": 99.9, "seed": 3, "top_k": 5, "min_p": 0.1},
        {"max_new_tokens": 10, "logprobs": 2, "logits_processors": [forbid(EXPECTED[0])]},
    ):
        assert len(pipe.generate(PROMPT, **settings).token_ids) < 20
        assert counted(pipe.generate(PROMPT, max_new_tokens=40)) == fresh


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_drafter_is_asked_for_what_the_budget_leaves(k):
    """A spy sees the budget less the token that the target adds anyway, and each step no more than is left."""
    asked = []

    def spy(token_ids, max_tokens):
        asked.append((len(token_ids) - len(PROMPT_IDS), max_tokens))
        return EXPECTED[len(token_ids) - len(PROMPT_IDS) :][:k]

    Pipeline(table_lm(), drafter=spy).generate_ids(PROMPT_IDS, max_new_tokens=20)
    assert asked[0] == (0, 19)
    assert all(max_tokens == 20 - emitted - 1 for emitted, max_tokens in asked)


PROMPTS = [
    "the cat",
    "moon and then",
    "user says the dog ran",
    "日本 was warm ★",
    "!",
    "on the mat the cat sat on the",
]


def test_two_interleaved_streams_do_not_disturb_each_other():
    """One pipeline, one thread, chunk by chunk in turn: each gives what it gives alone."""
    pipe = toy_pipeline()
    streams = [pipe.stream(prompt, max_new_tokens=30, stop=["👍 !"]) for prompt in PROMPTS]
    running = list(streams)
    while running:
        running = [stream for stream in running if next(stream, None) is not None]
    for prompt, stream in zip(PROMPTS, streams, strict=True):
        assert counted(stream.result) == counted(toy_pipeline().generate(prompt, max_new_tokens=30, stop=["👍 !"]))


@pytest.fixture
def often_switching():
    """Threads take turns every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("drafter", ["ngram", "ngram:k=2,min_n=2", "none"])
def test_threads_on_one_pipeline_do_not_disturb_each_other(drafter, often_switching):
    """Four threads, different prompts at once, several rounds: each gives what it gives alone."""
    pipe = toy_pipeline(drafter=drafter, chat_template=CHAT_TEMPLATE)
    alone = {
        prompt: counted(toy_pipeline(drafter=drafter, chat_template=CHAT_TEMPLATE).generate(prompt, max_new_tokens=25))
        for prompt in PROMPTS
    }
    barrier = threading.Barrier(4)

    def work(offset):
        barrier.wait()
        asked = [PROMPTS[(offset + i) % len(PROMPTS)] for i in range(20)]
        return [(prompt, counted(pipe.generate(prompt, max_new_tokens=25))) for prompt in asked]

    with ThreadPoolExecutor(4) as pool:
        outcomes = [pair for pairs in pool.map(work, range(4)) for pair in pairs]
    assert len(outcomes) == 80
    assert all(outcome == alone[prompt] for prompt, outcome in outcomes)


@pytest.mark.parametrize("policy", ["auto", "rejection", "block", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 40.0])
def test_the_global_random_state_is_left_alone(policy, temperature):
    """Neither building nor decoding draws from any of the three or seeds it."""
    torch.manual_seed(123)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    pipe = toy_pipeline(policy=policy)
    pipe.generate(PROMPT, max_new_tokens=20, seed=9, temperature=temperature)
    pipe.reference(PROMPT, max_new_tokens=20, seed=9, temperature=temperature)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_only_returned_tokens_are_counted():
    """Steps, drafts and acceptance of an oracle with k=6, ended by EOS in the middle of its third draft."""
    eos = next(i for i in range(15, 20) if EXPECTED[i] not in EXPECTED[:i])
    settings = {"max_new_tokens": 40, "eos_token_id": EXPECTED[eos]}
    stats = toy_pipeline(drafter=DRAFTERS["oracle"]).generate(PROMPT, **settings).stats
    assert stats["emitted_tokens"] == eos + 1
    assert stats["steps"] == 3
    assert stats["drafted_tokens"] == 18
    assert stats["accepted_tokens"] == 6 + 6 + (eos + 1 - 14)
    assert stats["mean_acceptance_length"] == (eos + 1) / 3
    assert stats["accept_lengths"] == [7, 7, eos + 1 - 14]
    assert stats["drafted_by_position"] == [3] * 6
    assert stats["accepted_by_position"] == [3 if i < eos + 1 - 14 else 2 for i in range(6)]
    assert stats["acceptance_by_position"] == [1.0 if i < eos + 1 - 14 else 2 / 3 for i in range(6)]
    reference = toy_pipeline().reference(PROMPT, **settings).stats
    assert (reference["emitted_tokens"], reference["steps"]) == (eos + 1, eos + 1)
    assert (reference["drafted_tokens"], reference["mean_acceptance_length"]) == (0, 1.0)


def test_statistics_are_plain_numbers_of_fixed_names():
    """They can be written as JSON, and seconds of the parts are within the total."""
    stats = toy_pipeline().generate(PROMPT, max_new_tokens=5).stats
    assert list(json.loads(json.dumps(stats))) == [
        *("steps", "drafted_tokens", "accepted_tokens", "emitted_tokens", "mean_acceptance_length"),
        *("accept_lengths", "acceptance_by_position", "accepted_by_position", "drafted_by_position"),
        *("time_to_first_token", "prefill_seconds", "draft_seconds", "verify_seconds", "total_seconds"),
        "tokens_per_second",
    ]
    assert len(stats["accept_lengths"]) == stats["steps"]
    assert sum(stats["accept_lengths"]) == stats["emitted_tokens"]
    assert stats["prefill_seconds"] < stats["time_to_first_token"] <= stats["total_seconds"]
    parts = stats["prefill_seconds"] + stats["draft_seconds"] + stats["verify_seconds"]
    assert 0 < parts <= stats["total_seconds"]


class Generous:
    """A lossy policy: keeps whatever was drafted."""

    lossless = False
    drafter_invariant = False
    uses_draft_probs = False

    def decide(self, draft, verification, sampling):
        return Verdict(len(draft), int(verification.logits[-1].argmax()))


@pytest.mark.parametrize("exact_to", ["quantized", "full"])
def test_the_guarantee_starts_with_what_the_output_equals(exact_to):
    """And names the target, for the speculative output as for the reference."""
    pipe = toy_pipeline(exact_to=exact_to, target_name="the toy")
    assert pipe.generate(PROMPT, max_new_tokens=3).guarantee.startswith(
        f"{exact_to}: the tokens equal those of the toy"
    )
    assert pipe.reference(PROMPT, max_new_tokens=3).guarantee.startswith(f"{exact_to}: the output of the toy itself")


def test_a_lossy_policy_guarantees_nothing_and_says_so():
    """What really held, not what was wished for; the reference is the target's own output all the same."""
    pipe = toy_pipeline(policy=Generous(), drafter=DRAFTERS["wrong"], exact_to="quantized", target_name="the toy")
    result = pipe.generate(PROMPT, max_new_tokens=20)
    assert result.token_ids != tuple(EXPECTED[:20])
    assert result.guarantee == "none: Generous is lossy; the output may differ from that of the toy"
    assert pipe.reference(PROMPT, max_new_tokens=20).guarantee.startswith("quantized: ")
    assert pipe.reference(PROMPT, max_new_tokens=20).token_ids == tuple(EXPECTED[:20])


@pytest.mark.parametrize(
    ("invariance", "words"),
    [("bitwise", "without exception"), ("argmax", "float32"), ("none", "more than their last bits")],
)
def test_the_guarantee_says_when_it_may_fail(invariance, words):
    """As far as the verifier declares that its logits depend on the width of a forward."""
    lm = TableLM(len(WORDS))
    lm.invariance = invariance
    assert words in Pipeline(lm).generate_ids([5], max_new_tokens=2).guarantee


class After(StoppingCriteria):
    """Stops once the whole sequence, prompt included, has a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        assert input_ids.shape[0] == 1
        assert input_ids[0, : len(PROMPT_IDS)].tolist() == PROMPT_IDS
        return torch.tensor([input_ids.shape[1] >= self.length])


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize(
    "criteria",
    [
        lambda token_ids: len(token_ids) == 5,
        [lambda token_ids: token_ids[-1] == EXPECTED[4]],
        [lambda token_ids: False, lambda token_ids: len(token_ids) >= 5],
        After(len(PROMPT_IDS) + 5),
        StoppingCriteriaList([After(10**6), After(len(PROMPT_IDS) + 5)]),
        [EosTokenCriteria(EXPECTED[4])],
    ],
    ids=["function", "last token", "several functions", "transformers", "transformers list", "built into transformers"],
)
def test_custom_criteria_stop_at_the_token_that_fulfils_them(criteria, drafter):
    """Functions of the new tokens or transformers' criteria; also in the middle of an accepted draft."""
    pipe = toy_pipeline(drafter=drafter)
    for ask in (pipe.generate, pipe.reference):
        result = ask(PROMPT, max_new_tokens=30, stopping_criteria=criteria)
        assert (result.token_ids, result.finish_reason) == (tuple(EXPECTED[:5]), "stop")


# Sampling


SAMPLED = {
    "plain": {"temperature": 40.0},
    "hot": {"temperature": 300},
    "cold": {"temperature": 10.0},
    "top-k": {"temperature": 40.0, "top_k": 3},
    "top-p": {"temperature": 40.0, "top_p": 0.6},
    "min-p": {"temperature": 40.0, "min_p": 0.3},
    "all cuts": {"temperature": 80.0, "top_k": 9, "top_p": 0.9, "min_p": 0.1},
}
"""The logits of the toy go up to 1000: at 40 it hesitates, and the drafters, which guess greedily, are often right."""


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("settings", SAMPLED.values(), ids=SAMPLED)
def test_sampling_gives_the_target_s_own_tokens_with_the_same_seed(drafter, settings):
    """At any temperature and with any cut, by every way of asking; other seeds give other tokens."""
    pipe = toy_pipeline(drafter=drafter)
    outputs = set()
    for seed in range(8):
        asked = {"max_new_tokens": 20, "seed": seed, **settings}
        result = pipe.generate(PROMPT, **asked)
        stream = pipe.stream(PROMPT, **asked)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == result.text
        for other in (stream.result, pipe.generate_ids(PROMPT_IDS, **asked), pipe.reference(PROMPT, **asked)):
            assert content(other) == content(result)
        assert result.guarantee.startswith(
            f"target: the tokens equal those of the verifier's target decoded alone, with the same seed ({seed})"
        )
        outputs.add(result.token_ids)
    assert len(outputs) > 1


def test_some_sampled_drafts_are_accepted_and_some_are_not():
    """Otherwise the equality above would be tested with right or with wrong guesses only."""
    for drafter in ("ngram", "oracle", "mostly right"):
        pipe = toy_pipeline(drafter=DRAFTERS[drafter])
        stats = [pipe.generate(PROMPT, max_new_tokens=60, seed=seed, **SAMPLED["cold"]).stats for seed in range(9)]
        accepted, drafted = (sum(s[name] for s in stats) for name in ("accepted_tokens", "drafted_tokens"))
        assert 20 < accepted < drafted - 20


@given(
    st.sampled_from(list(DRAFTERS)),
    st.integers(1, 30),
    st.lists(STOPS, max_size=2),
    st.none() | st.integers(0, len(WORDS) - 1),
    st.sampled_from(list(SAMPLED)),
    st.integers(-(2**70), 2**70),
)
def test_stops_end_sampled_output_alike(drafter, max_new_tokens, stop, eos, how, seed):
    """Budget, stop strings and EOS end sampled speculative output where they end plain sampling."""
    asked = {"max_new_tokens": max_new_tokens, "stop": stop, "eos_token_id": eos, "seed": seed, **SAMPLED[how]}
    pipe = toy_pipeline(drafter=DRAFTERS[drafter])
    result = pipe.generate(PROMPT, **asked)
    event(result.finish_reason)
    assert content(result) == content(pipe.reference(PROMPT, **asked))


@pytest.mark.parametrize("policy", ["auto", "rejection", "block", "typical"])
def test_a_seed_gives_the_same_tokens_whatever_ran_before_or_between(policy):
    """Noise belongs to seed and position: not to a generator that others draw from, nor to torch's own seed."""
    pipe = toy_pipeline(policy=policy)
    asked = {"max_new_tokens": 25, "temperature": 40, "seed": 11}
    torch.manual_seed(1)
    alone = counted(pipe.generate(PROMPT, **asked))
    torch.manual_seed(2)
    stream = pipe.stream(PROMPT, **asked)
    while next(stream, None) is not None:
        pipe.generate("moon and then", max_new_tokens=5, temperature=40, seed=3)
        torch.rand(3)
    assert counted(stream.result) == alone
    assert counted(toy_pipeline(policy=policy).generate(PROMPT, **asked)) == alone
    assert content(pipe.generate(PROMPT, **{**asked, "seed": 12})) != alone[0]


def test_a_longer_budget_only_continues_what_a_shorter_one_said():
    """The noise of a position does not depend on how far the output goes."""
    pipe, asked = toy_pipeline(), {"temperature": 40.0, "seed": 4}
    longest = pipe.generate(PROMPT, max_new_tokens=30, **asked).token_ids
    for budget in range(1, 30):
        assert pipe.generate(PROMPT, max_new_tokens=budget, **asked).token_ids == longest[:budget]


@pytest.mark.parametrize("policy", ["rejection", "block"])
def test_a_policy_that_is_exact_in_distribution_claims_that_and_no_more(policy):
    """Token by token at temperature 0; above it the same distribution, of which the tokens are another draw."""
    pipe = toy_pipeline(policy=policy, target_name="the toy")
    asked = {"max_new_tokens": 25, "seed": 1}
    greedy = pipe.generate(PROMPT, **asked)
    assert greedy.guarantee.startswith("target: the tokens equal those of the toy decoded alone, greedily")
    assert greedy.token_ids == pipe.reference(PROMPT, **asked).token_ids
    sampled = [pipe.generate(PROMPT, temperature=40, max_new_tokens=25, seed=seed) for seed in range(5)]
    claim = "target: the tokens are distributed as those of the toy sampled alone"
    assert all(result.guarantee.startswith(claim) for result in sampled)
    own = [pipe.reference(PROMPT, temperature=40, max_new_tokens=25, seed=seed) for seed in range(5)]
    assert [result.token_ids for result in sampled] != [result.token_ids for result in own]


@pytest.mark.parametrize("policy", ["margin", "margin:margin=0.5", "typical", "typical:epsilon=0.01"])
@pytest.mark.parametrize("temperature", [0.0, 40.0])
def test_the_lossy_policies_claim_nothing(policy, temperature):
    """Their output may be the target's own, and is not said to be."""
    result = toy_pipeline(policy=policy).generate(PROMPT, max_new_tokens=10, temperature=temperature)
    assert result.guarantee.startswith("none: ")
    assert len(result.token_ids) == 10


def test_the_policy_greedy_never_samples():
    """It says what does, when it is asked to; at temperature 0 it gives what the default gives."""
    pipe = toy_pipeline(policy="greedy")
    assert pipe.generate(PROMPT, max_new_tokens=9).token_ids == tuple(EXPECTED[:9])
    with pytest.raises(
        InvalidRequestError, match=r"temperature=0\.5, but the policy 'greedy' never samples; use 'auto'"
    ):
        pipe.generate(PROMPT, temperature=0.5)


# Logits processors and log-probabilities


class Alternating:
    """A processor with a state: it counts its calls, and forbids even and odd tokens in turns."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen.append(input_ids.shape[1])
        assert self.seen == list(range(self.seen[0], self.seen[0] + len(self.seen))), "a position was seen twice"
        scores[:, len(self.seen) % 2 :: 2] = -INF
        return scores


PROCESSORS = {
    "a function": forbid(EXPECTED[0], EXPECTED[3]),
    "several": [forbid(EXPECTED[0]), forbid(EXPECTED[1])],
    "of transformers": [RepetitionPenaltyLogitsProcessor(1.5)],
    "with a state": [Alternating()],
}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("temperature", [0.0, 200.0])
def test_logits_processors_act_in_speculation_as_in_plain_decoding(drafter, processors, temperature):
    """The same tokens with the drafter and without it, and others than without processors."""
    pipe, asked = toy_pipeline(drafter=drafter), {"max_new_tokens": 30, "temperature": temperature}
    result = pipe.generate(PROMPT, logits_processors=processors, **asked)
    assert content(result) == content(pipe.reference(PROMPT, logits_processors=processors, **asked))
    assert result.token_ids != pipe.generate(PROMPT, **asked).token_ids
    again = pipe.generate(PROMPT, logits_processors=processors, **asked)
    assert content(again) == content(result)


def test_processors_are_applied_in_order():
    """The second sees what the first made of the scores."""
    only = WORDS.index("moon")

    def force(input_ids, scores):
        return torch.full_like(scores, -INF).index_fill_(1, torch.tensor([only]), 0.0)

    def rather_not(input_ids, scores):
        return torch.where(scores == -INF, torch.zeros_like(scores), scores - 1)

    pipe = toy_pipeline()
    assert set(pipe.generate(PROMPT, max_new_tokens=5, logits_processors=[force]).token_ids) == {only}
    assert only not in pipe.generate(PROMPT, max_new_tokens=5, logits_processors=[force, rather_not]).token_ids


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("n", [0, 1, 3, 10**6])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_the_row_that_a_token_came_from(drafter, n, temperature):
    """One entry a token, the target's own row at that position, temperature and cuts left out of account."""
    lm = table_lm(levels=4)  # logits 0 to 3: at temperature 1 it hesitates
    pipe = Pipeline(lm, drafter=drafter)
    asked = {"max_new_tokens": 25, "temperature": temperature, "top_k": 9, "seed": 2, "logprobs": n}
    result = pipe.generate_ids(PROMPT_IDS, **asked)
    assert len(result.logprobs) == len(result.token_ids) == 25
    assert result.logprobs == pipe.reference(PROMPT_IDS, **asked).logprobs
    for i, (token_id, entry) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        row = lm.row([*PROMPT_IDS, *result.token_ids[:i]]).log_softmax(dim=-1)
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-5)
        assert len(entry.top) == min(n, len(WORDS))
        assert list(entry.top.values()) == pytest.approx(row.sort(descending=True).values[:n].tolist(), abs=1e-5)
        assert all(value == pytest.approx(float(row[other]), abs=1e-5) for other, value in entry.top.items())


def test_log_probabilities_end_where_the_tokens_end():
    """Also where a stop cuts an accepted draft; and they are given only where they are asked for."""
    pipe = toy_pipeline(drafter=DRAFTERS["oracle"])
    asked = {"max_new_tokens": 40, "stop": [WORDS[EXPECTED[3]]]}
    result = pipe.generate(PROMPT, logprobs=1, **asked)
    assert len(result.logprobs) == len(result.token_ids) == EXPECTED.index(EXPECTED[3]) + 1
    assert pipe.generate(PROMPT, **asked).logprobs is None
    stream = pipe.stream(PROMPT, logprobs=1, **asked)
    list(stream)
    assert stream.result.logprobs == result.logprobs


def test_log_probabilities_are_those_of_the_processed_logits():
    """A forbidden token has none, and what is left adds up to one."""
    banned = EXPECTED[0]
    asked = {"max_new_tokens": 3, "logits_processors": forbid(banned), "logprobs": len(WORDS)}
    for entry in toy_pipeline().generate(PROMPT, **asked).logprobs:
        assert entry.top[banned] == -INF
        assert sum(np.exp(list(entry.top.values()))) == pytest.approx(1)


# Exact to the full model, through its quantized copy


@pytest.mark.parametrize("policy", ["auto", "greedy", "rejection", "block"])
def test_a_quantized_copy_can_draft_for_the_full_model(policy):
    """The tokens are those of the full model, most of them drafted by the copy, and the guarantee names it."""
    model = tiny_llama()
    prompt_ids, asked = [7, 8, 9, 7, 8], {"max_new_tokens": 40, "eos_token_id": None}
    full = Pipeline.from_model(model, quantizer="none", drafter="none")
    pipe = Pipeline.from_model(model, quantizer="w8a8", exact_to="full", policy=policy)
    result = pipe.generate_ids(prompt_ids, **asked)
    assert result.token_ids == full.generate_ids(prompt_ids, **asked).token_ids
    assert result.token_ids == pipe.reference(prompt_ids, **asked).token_ids
    assert result.guarantee.startswith("full: the tokens equal those of the model as it was given decoded alone")
    assert result.stats["accepted_tokens"] > 0
    assert pipe.description["exact_to"] == "full"
    assert pipe.description["quantizer"] == "w8a8"


@pytest.mark.parametrize("drafter", ["ngram", "none", lambda token_ids, k: token_ids[:k]])
def test_sampling_is_exact_to_the_full_model_as_well(drafter):
    """With the same seed, token by token; the copy drafts with the same noise."""
    model = tiny_llama()
    asked = {"max_new_tokens": 40, "eos_token_id": None, "temperature": 0.8, "top_p": 0.95}
    full = Pipeline.from_model(model, quantizer="none", drafter="none")
    pipe = Pipeline.from_model(model, exact_to="full", drafter=drafter)
    for seed in range(3):
        result = pipe.generate_ids([1, 2, 3], seed=seed, **asked)
        assert result.token_ids == full.reference([1, 2, 3], seed=seed, **asked).token_ids
        assert result.guarantee.startswith("full: the tokens equal those of the model as it was given")
        assert result.stats["accepted_tokens"] > result.stats["drafted_tokens"] / 2


def test_without_a_quantizer_there_is_no_cascade():
    """exact_to="full" is what quantizer="none" means anyway."""
    for exact_to in ("full", "quantized"):
        pipe = Pipeline.from_model(tiny_llama(), quantizer="none", exact_to=exact_to, drafter="ngram:k=3")
        assert type(pipe.drafter).__name__ == "NgramDrafter"
        assert pipe.generate_ids([1, 2], max_new_tokens=3).guarantee.startswith("full: ")


def test_an_unknown_exact_to_is_refused():
    """By both ways of building."""
    for build in (lambda: Pipeline(table_lm(), exact_to="half"), lambda: Pipeline.from_model(None, exact_to="half")):
        with pytest.raises(InvalidRequestError, match="exact_to='half': give one of quantized, full"):
            build()


def test_several_sequences_are_those_of_their_seeds():
    """Result i of ``num_return_sequences`` is what seed + i gives by itself; they differ; both calls take it."""
    pipe = toy_pipeline()
    settings = {"max_new_tokens": 12, "temperature": 200.0, "seed": 5}
    several = pipe.generate("the cat", num_return_sequences=4, **settings)
    alone = [pipe.generate("the cat", **{**settings, "seed": 5 + i}) for i in range(4)]
    assert [result.token_ids for result in several] == [result.token_ids for result in alone]
    assert len({result.token_ids for result in several}) == 4
    assert all(f"seed ({5 + i})" in result.guarantee for i, result in enumerate(several))
    ids = pipe.generate_ids([5, 6], num_return_sequences=2, **settings)
    assert [result.token_ids for result in ids] == [
        pipe.generate_ids([5, 6], **{**settings, "seed": seed}).token_ids for seed in (5, 6)
    ]
    assert len(pipe.generate("the cat", num_return_sequences=1, max_new_tokens=3)) == 1


@pytest.mark.parametrize(
    ("n", "temperature", "message"),
    [
        (0, 1.0, "num_return_sequences=0: give an integer of at least 1"),
        (True, 1.0, "num_return_sequences=True"),
        (2, 0.0, "num_return_sequences=2 at temperature 0 would return one output 2 times"),
    ],
)
def test_a_number_of_sequences_that_makes_no_sense_is_refused(n, temperature, message):
    """Before anything is decoded."""
    with pytest.raises(InvalidRequestError, match=message):
        toy_pipeline().generate("the cat", num_return_sequences=n, temperature=temperature)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty=0: give a number above 0"),
        ({"no_repeat_ngram_size": 0}, "no_repeat_ngram_size=0: give an integer of at least 1"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1: give an integer of at least 0"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is more than max_new_tokens=8"),
    ],
)
def test_shorthands_out_of_range_are_refused(setting, message):
    """With what would do."""
    with pytest.raises(InvalidRequestError, match=message):
        toy_pipeline().generate("the cat", **setting)


# Drafters that know the target's model


class Binding(EmptyDrafter):
    """Notes what it is bound to, and returns something."""

    def __init__(self, bound):
        self.bound, self.seen = bound, []

    def bind(self, model, tokenizer, calibration):
        self.seen.append((model, tokenizer, calibration))
        return self.bound or self


@pytest.mark.parametrize("exact_to", ["quantized", "full"])
@pytest.mark.parametrize("quantizer", ["none", "w8a8"])
def test_a_drafter_is_bound_once_to_the_model_as_it_was_given(quantizer, exact_to):
    """Before anything of it is computed, with its tokenizer and the calibration; what bind returns is what drafts."""
    model, tokenizer = tiny_llama(), word_tokenizer()
    model.register_forward_pre_hook(lambda *arguments: seen_before.append(len(drafter.seen)))
    seen_before: list[int] = []
    drafter = Binding(FunctionDrafter(lambda token_ids, k: token_ids[:1]))
    choices = {"quantizer": quantizer, "exact_to": exact_to, "calibration": ["the cat", "dog"]}
    pipe = Pipeline.from_model(model, tokenizer, drafter=drafter, **choices)
    for _ in range(2):
        assert pipe.generate_ids([5, 6], max_new_tokens=5, eos_token_id=None).stats["drafted_tokens"] > 0
    ((given_model, given_tokenizer, calibration),) = drafter.seen
    assert given_model is model
    assert given_tokenizer is tokenizer
    assert [token_ids.tolist() for token_ids in calibration] == [[[5, 6]], [[7]]]
    assert all(n == 1 for n in seen_before)
    outermost = pipe.drafter.drafter if (quantizer, exact_to) == ("w8a8", "full") else pipe.drafter
    assert outermost is drafter.bound


def test_a_drafter_may_return_itself_and_there_may_be_no_tokenizer():
    """Then there is no calibration either."""
    drafter, model = Binding(None), tiny_llama()
    assert Pipeline.from_model(model, drafter=drafter).drafter is drafter
    assert drafter.seen == [(model, None, None)]


def test_what_bind_returns_must_be_a_drafter():
    """The message names who returned it."""
    with pytest.raises(PluginError, match=r"what Binding\.bind returned has no method start"):
        Pipeline.from_model(tiny_llama(), drafter=Binding([1, 2]))


def test_a_pipeline_over_a_verifier_binds_nothing():
    """It has no model to bind to; a drafter that can do without drafts."""
    drafter = Binding(None)
    assert Pipeline(table_lm(), drafter=drafter).generate_ids(PROMPT_IDS, max_new_tokens=4).token_ids == (
        *EXPECTED[:4],
    )
    assert drafter.seen == []


@pytest.mark.parametrize(
    ("policy", "wants_probs"), [("auto", False), ("greedy", False), ("rejection", True), ("block", True)]
)
def test_a_drafter_is_told_whether_its_probabilities_are_judged(policy, wants_probs):
    """By the policy of its own loop: that of a cascade's inner loop judges none, whatever the outer one does."""
    seen = []

    class Spy(EmptyDrafter):
        def start(self, prompt_ids, sampling):
            seen.append(sampling.wants_probs)
            return self

    toy_pipeline(drafter=Spy(), policy=policy).generate(PROMPT, max_new_tokens=3)
    assert seen == [wants_probs]
    seen.clear()
    cascade = NestedDrafter(Spy(), table_lm(), k=3, min_k=1)
    draft = cascade.start(PROMPT_IDS, Sampling(wants_probs=wants_probs), None).propose(3)
    assert seen == [False]
    assert (draft.probs is not None) == wants_probs


@pytest.mark.parametrize(
    ("model", "choices", "message"),
    [
        (
            "smollm2",
            {},
            "takes a transformers model that is loaded, got 'smollm2'; from_pretrained loads one",
        ),
        (None, {}, "from_model takes a transformers model that is loaded, got None"),
        ("tiny", {"strict": "no"}, "strict='no': give true or false"),
        ("tiny", {"verifier": "causal_lm:strict=2"}, "strict=2, expected true or false"),
        ("tiny", {"calibration": 5}, "calibration=5; give a file, a list of prompts, or None"),
        ("tiny", {"policy": "margin:margin=x"}, "margin='x', expected a number from 0 to 1"),
        ("tiny", {"policy": "margin:margin=nan"}, "margin=nan, expected a number from 0 to 1"),
        ("tiny", {"policy": "typical:epsilon=nan"}, "epsilon=nan, expected a number of at least 0"),
        ("tiny", {"policy": "typical:alpha=-1"}, "alpha=-1, expected a number of at least 0"),
    ],
)
def test_a_choice_that_makes_no_sense_is_one_line(model, choices, message):
    """Not a traceback from inside, and not something else than what was asked for."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        Pipeline.from_model(tiny_llama() if model == "tiny" else model, **choices)
    assert "\n" not in str(caught.value)


def test_a_model_in_place_of_a_verifier_is_named_in_one_line():
    """Its printed structure has hundreds of lines."""
    with pytest.raises(PluginError, match="has no method start") as caught:
        Pipeline(tiny_llama())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("returned", [None, [1.0], torch.zeros(1, 3), torch.zeros(23)])
def test_a_processor_that_returns_no_scores_is_named(returned):
    """Silently decoding from something else would be worse."""

    def mine(input_ids, scores):
        return returned

    with pytest.raises(PluginError, match=r"logits processor mine returned .*, expected \[1, V\] = \[1, 23\]"):
        toy_pipeline().generate(PROMPT, logits_processors=mine)
