"""Calibration prompts that are given to a quantizer directly, without a pipeline that cuts them."""

from __future__ import annotations

import pytest
import torch

from quasar.errors import InvalidRequestError
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing.models import random_prompt, tiny


def prompt(length: int) -> torch.Tensor:
    return torch.tensor([random_prompt(length)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"activations": "static", "smooth": "none"}])
def test_a_prompt_that_is_longer_than_the_context_is_refused(family, options):
    """A rotary embedding would go past what the model was made for, a table of positions fail deep inside."""
    model, quantizer = tiny(family), W8A8Quantizer(**options)
    longest = model.config.max_position_embeddings
    quantizer.quantize(model, [prompt(longest)])
    message = f"w8a8: calibration prompt 1 has {longest + 1} tokens, but the model's context is {longest}; cut it to "
    with pytest.raises(InvalidRequestError, match=message):
        quantizer.quantize(model, [prompt(3), prompt(longest + 1)])


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.tensor([1, 2, 3]), r"of shape \[3\]"),
        (torch.tensor([[1, 2], [3, 4]]), r"of shape \[2, 2\]"),
        ([1, 2, 3], "a list"),
        ("a text", "a str"),
    ],
)
def test_a_prompt_is_one_sequence_of_token_ids(given, got):
    """Whatever else is given is called what it is."""
    message = rf"^w8a8: calibration prompt 0 is {got}, expected a tensor \[1, T\] of token ids$"
    with pytest.raises(InvalidRequestError, match=message):
        W8A8Quantizer().quantize(tiny("llama"), [given])
