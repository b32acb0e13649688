"""Forwards over several sequences at once: each says, bit by bit, what it says alone."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_models import in_format, model_of, random_tokens

from quasar.errors import NumericalError
from quasar_native import _native
from quasar_native.architecture import Architecture
from quasar_native.errors import ContextOverflowError
from quasar_native.kernel import pool_of

MODELS = [("float32", "llama"), ("w8a8", "qwen3"), ("hqq a8 groups of 32", "gemma3"), ("float32", "gemma2")]
VOCAB = 64


@functools.cache
def compiled(form: str = "float32", family: str = "llama") -> _native.Model:
    return Architecture(in_format(form, family), "auto").model


def engine(threads: int = 1, instructions: str = "auto") -> _native.Engine:
    return _native.Engine(pool_of(threads), instructions)


def ids(tokens) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int32)


def filled(model: _native.Model, form: str, tokens) -> _native.Cache:
    """A cache that holds ``tokens``."""
    cache = _native.Cache(model, form)
    engine().forward(model, [_native.Segment(cache, ids(tokens))], torch.empty(0, VOCAB))
    return cache


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[str, list[int], list[int], int, int]]:
    """Of each: a format of cache, what it holds, the tokens that follow, and rows of logits and of hidden states."""
    found = []
    for seed in range(draw(st.integers(1, 3), label="segments")):
        n = draw(st.integers(1, 8) | st.integers(60, 140), label="tokens")
        known = draw(st.integers(0, 5) | st.integers(55, 100), label="cached")
        tokens = random_tokens(known + n, draw(st.integers(0, 2**31), label="seed") + seed)
        wanted = draw(st.integers(0, n), label="logits"), draw(st.integers(0, n), label="hidden states")
        form = draw(st.sampled_from(_native.cache_formats()), label="cache")
        found.append((form, tokens[:known], tokens[known:], *wanted))
    return found


@given(sequences(), st.sampled_from(MODELS), st.integers(1, 3), st.sampled_from(_native.available_instructions()))
def test_each_segment_says_what_it_says_alone(several, which, threads, instructions):
    """Logits and hidden states of every layer, whatever the others' lengths, caches and formats are."""
    model, run = compiled(*which), engine(threads, instructions)

    def forward(some):
        caches = [filled(model, form, known) for form, known, *_ in some]
        segments = [
            _native.Segment(cache, ids(new), n_logits, n_hidden)
            for cache, (_, _, new, n_logits, n_hidden) in zip(caches, some, strict=True)
        ]
        logits = torch.full((sum(one[3] for one in some), model.vocab), torch.nan)
        hidden = [torch.full((sum(one[4] for one in some), model.hidden), torch.nan) for _ in range(model.layers + 1)]
        run.forward(model, segments, logits, list(enumerate(hidden)))
        assert [cache.length for cache in caches] == [len(known) + len(new) for _, known, new, *_ in some]
        return [logits, *hidden]

    alone = [forward([one]) for one in several]
    for together, parts in zip(forward(several), zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(parts))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
def test_hidden_states_of_every_layer_are_those_of_transformers(family):
    """Index 0 is the embedding, the last what the output head sees."""
    tokens, model = random_tokens(40), compiled("float32", family)
    found = [torch.empty(40, model.hidden) for _ in range(model.layers + 1)]
    segment = _native.Segment(_native.Cache(model, "float32"), ids(tokens), n_hidden=40)
    engine().forward(model, [segment], torch.empty(0, model.vocab), list(enumerate(found)))
    with torch.no_grad():
        expected = model_of(family)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ({"logits": torch.empty(2, VOCAB, dtype=torch.float64)}, TypeError, "incompatible"),
        ({"logits": torch.empty(VOCAB, 2).T}, TypeError, "incompatible"),
        ({"logits": torch.empty(2, VOCAB, device="meta")}, TypeError, "incompatible"),
        ({"logits": torch.empty(3, VOCAB)}, ValueError, r"logits of shape \[3, 64\], expected \[2, 64\]"),
        ({"logits": torch.empty(2, VOCAB - 1)}, ValueError, r"logits of shape \[2, 63\]"),
        ({"hidden": [(1, torch.empty(1, 64, dtype=torch.float64))]}, TypeError, "incompatible"),
        ({"hidden": [(1, torch.empty(2, 64))]}, ValueError, r"hidden states of shape \[2, 64\], expected \[1, 64\]"),
        ({"hidden": [(99, torch.empty(1, 64))]}, ValueError, "hidden states behind layer 99"),
    ],
)
def test_an_output_that_cannot_be_written_in_place_is_refused(outputs, error, message):
    """It is never filled as a copy that nobody sees; the cache stays as it was."""
    model = compiled()
    cache = filled(model, "float32", [1, 2, 3])
    segment = _native.Segment(cache, ids([4, 5]), n_logits=2, n_hidden=1)
    with pytest.raises(error, match=message):
        engine().forward(model, [segment], **{"logits": torch.empty(2, VOCAB), **outputs})
    assert cache.length == 3


def test_tokens_in_another_type_are_refused():
    with pytest.raises(TypeError, match="incompatible"):
        _native.Segment(_native.Cache(compiled(), "float32"), torch.tensor([1, 2]))


def test_segments_that_do_not_fit_are_refused_and_change_no_cache():
    """One cache twice, a cache of another model, more rows than tokens, a context that is too short."""
    model = compiled()
    caches = [filled(model, "float32", random_tokens(n)) for n in (3, 254)]
    foreign = _native.Cache(Architecture(model_of("smollm3"), "auto").model, "float32")
    good = _native.Segment(caches[0], ids([4]), n_logits=1)
    for bad, error, message in [
        (_native.Segment(caches[0], ids([5])), ValueError, "two segments with one cache"),
        (_native.Segment(foreign, ids([5])), ValueError, "made for another model"),
        (_native.Segment(caches[1], ids([5]), n_hidden=2), ValueError, "2 of hidden states of 1 tokens"),
        (_native.Segment(caches[1], ids([VOCAB])), IndexError, "token id 64"),
        (_native.Segment(caches[1], ids([5, 6, 7])), ContextOverflowError, "257 tokens"),
    ]:
        with pytest.raises(error, match=message):
            engine().forward(model, [good, bad], torch.empty(1, VOCAB))
        assert [cache.length for cache in caches] == [3, 254]
    with pytest.raises(ValueError, match="expected one of float32, bfloat16, int8"):
        _native.Cache(model, "int4")


def test_a_segment_that_is_not_finite_is_named():
    """Its number and its position."""
    broken = model_of("qwen2")
    embedding = broken.get_input_embeddings().weight
    model, kept = compiled("float32", "qwen2"), embedding[9].clone()
    caches = [filled(model, "float32", [1, 2]) for _ in range(2)]
    segments = [_native.Segment(cache, ids([3, last]), n_logits=2) for cache, last in zip(caches, (4, 9), strict=True)]
    try:
        with torch.no_grad():
            embedding[9] = torch.nan
        with pytest.raises(NumericalError, match="position 3 of the sequence in segment 1 "):
            engine().forward(model, segments, torch.empty(4, VOCAB))
    finally:
        with torch.no_grad():
            embedding[9] = kept
    assert [cache.length for cache in caches] == [2, 2]
