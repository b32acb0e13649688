"""Does the engine compute what the model computes? Tried once on a few tokens, so that nothing is missed in silence."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quasar.errors import NumericalError, UnsupportedModelError
from quasar.weights.layers import structure_copy
from quasar.weights.linear import QuantizedLinear
from quasar_native import _native

_LENGTH = 12
_MOST = 96

_FLOAT32 = 1e-3
_ROUNDED = 0.15
"""How far logits may be from the model's, as root mean square in units of their standard deviation.

Where activations are rounded to integers, or computed in 16 bits by the model, last bits become whole rounding steps.
"""


def check_agrees(
    engine: _native.Engine, compiled: _native.Model, model: PreTrainedModel, windows: Iterable[int]
) -> None:
    """Compare logits of all positions of a random prompt, which is longer than the ``windows`` that are short.

    Raises:
        UnsupportedModelError: They differ by more than rounding explains.
        NumericalError: The model's own are not finite.
    """
    length = max([_LENGTH, *(window + 4 for window in windows if window + 4 <= _MOST)])
    length = min(length, compiled.max_length or length)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(compiled.vocab, (length,), device="cpu", generator=generator)
    expected = _logits_of(model, token_ids)
    if not torch.isfinite(expected).all():
        raise NumericalError(f"{type(model).__name__}: its logits are not finite (non-finite weights, or an overflow)")
    found = torch.empty((length, compiled.vocab), dtype=torch.float32, device="cpu")
    segment = _native.Segment(_native.Cache(compiled, "float32"), token_ids.int(), n_logits=length)
    engine.forward(compiled, [segment], found)
    difference = float((found - expected).square().mean().sqrt() / expected.std().clamp_min(1e-30))
    allowed = _tolerance(model)
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"on {length} random tokens the engine's logits differ from the model's by {difference:.2g} of their "
            f"standard deviation, and rounding explains {allowed:g}"
        )


@torch.no_grad()
def _logits_of(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    evaluated: nn.Module = model if not model.training else structure_copy(model).eval()
    logits: Tensor = evaluated(input_ids=token_ids.unsqueeze(0), use_cache=False).logits[0]
    return logits.float()


def _tolerance(model: PreTrainedModel) -> float:
    layers = (module for module in model.modules() if isinstance(module, QuantizedLinear))
    rounds = any(layer.activations != "none" for layer in layers)
    return _ROUNDED if rounds or model.dtype != torch.float32 else _FLOAT32
