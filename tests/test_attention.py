"""Attention by rows: the hidden states of a position do not depend on how many positions are computed with it."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch

from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing.models import FAMILIES, random_prompt, tiny
from quasar.types import Draft
from quasar.verifiers import causal_lm_session
from quasar.verifiers.attention import attending_by_rows, is_attending_by_rows, use_row_attention
from quasar.verifiers.causal_lm import CausalLMVerifier

N = 16
WIDTHS = range(2, 17)
VARIANTS = [
    (family, implementation)
    for family in ("llama", "qwen3", "gemma3", "mistral_window", "gemma2")
    for implementation in FAMILIES[family].attentions
]


@functools.cache
def verifier_of(family: str, implementation: str) -> CausalLMVerifier:
    """A verifier over the W8A8-quantized model; its output head is left in floating point."""
    model = tiny(family, attention=implementation)
    return CausalLMVerifier(W8A8Quantizer().quantize(model, [torch.tensor([random_prompt(40, seed=9)])]).model)


def hidden_states(verifier: CausalLMVerifier, context: int, width: int, n: int = N) -> torch.Tensor:
    """``[n, D]`` last hidden states (before the output head) of n positions, computed ``width`` at a time."""
    prompt, tokens = random_prompt(context), random_prompt(n, seed=5)
    session = verifier.start(prompt, frozenset({"hidden:-1"}))
    rows = []
    for begin in range(0, n, width):
        window = tokens[begin : begin + width]
        rows.append(session.verify(Draft(window[: min(width, n - begin) - 1])).features["hidden:-1"])
        session.commit(window)
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "implementation"), VARIANTS)
@pytest.mark.parametrize("context", [5, 150])
def test_hidden_states_are_bit_identical_for_every_width(family, implementation, context):
    """Widths 1 to 16 over a short and a long context, past the sliding windows too: not one bit differs."""
    verifier = verifier_of(family, implementation)
    alone = hidden_states(verifier, context, 1)
    for width in WIDTHS:
        assert torch.equal(hidden_states(verifier, context, width), alone), f"width {width}"


def test_without_attention_by_rows_the_width_changes_the_bits(monkeypatch):
    """The tests above can fail: with the mode off, kernels for one query and for several differ on these models."""
    monkeypatch.setattr(causal_lm_session, "attending_by_rows", contextlib.nullcontext)
    differing = [
        (family, implementation)
        for family, implementation in VARIANTS
        if not torch.equal(
            hidden_states(verifier_of(family, implementation), 150, N),
            hidden_states(verifier_of(family, implementation), 150, 1),
        )
    ]
    assert differing


def _forward(model, token_ids):
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def test_each_row_is_computed_over_the_keys_up_to_its_own_and_no_others():
    """Another token changes the rows from its own on, each of them, and leaves every bit of those before it."""
    model = tiny("llama", num_hidden_layers=1)
    assert use_row_attention(model)
    token_ids = random_prompt(6)
    with attending_by_rows():
        logits = _forward(model, token_ids)
        for i in range(len(token_ids)):
            others = _forward(model, [*token_ids[:i], token_ids[i] ^ 1, *token_ids[i + 1 :]])
            assert torch.equal(others[:i], logits[:i])
            assert (others[i:] != logits[i:]).any(dim=1).all()


def test_the_mode_ends_with_its_statement_also_after_an_error():
    """A failing forward must not leave later ones in row mode."""
    with pytest.raises(ZeroDivisionError), attending_by_rows():
        raise ZeroDivisionError
    assert not is_attending_by_rows()
    with attending_by_rows():
        with attending_by_rows():
            pass
        assert is_attending_by_rows()


def test_two_threads_at_once_keep_their_own_mode():
    """One thread verifies by rows while another computes a whole draft with the same model."""
    model, token_ids = tiny("llama"), random_prompt(5)
    assert use_row_attention(model)
    with attending_by_rows():
        expected = {"by rows": _forward(model, token_ids)}
    expected["whole"] = _forward(model, token_ids)
    meet = threading.Barrier(2, timeout=60)
    found, modes = {}, {}

    def in_attention(*_):
        meet.wait()  # both are in a forward now
        modes.setdefault(threading.current_thread().name, set()).add(is_attending_by_rows())

    def by_rows():
        with attending_by_rows():
            found["by rows"] = _forward(model, token_ids)

    def whole():
        found["whole"] = _forward(model, token_ids)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(in_attention)
    threads = [threading.Thread(target=by_rows, name="by rows"), threading.Thread(target=whole, name="whole")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert modes == {"by rows": {True}, "whole": {False}}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", [name for name, kind in FAMILIES.items() if not kind.replaceable])
def test_attention_that_cannot_be_replaced_is_left_alone(family):
    """``False`` says so, and the model still uses its own attention."""
    model = tiny(family)
    before = model.config._attn_implementation
    assert not use_row_attention(model)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(("family", "implementation"), VARIANTS)
def test_by_rows_the_same_is_computed_as_before(family, implementation):
    """To rounding: soft-caps, windows and scalings of each architecture are kept."""
    model = tiny(family, attention=implementation)
    token_ids = random_prompt(20)
    expected = _forward(model, token_ids)
    assert use_row_attention(model)
    assert torch.equal(_forward(model, token_ids), expected)
    with attending_by_rows():
        torch.testing.assert_close(_forward(model, token_ids), expected, rtol=0, atol=5e-5)
