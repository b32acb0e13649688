"""How much each quantized layer errs, and what that does to the model: what to leave out with ``exclude``.

Works for any quantizer that inherits from :class:`quasar.quantizers.assembly.LayerQuantizer`. The quantized model is
compared with its twin that has all that was moved between layers, but nothing rounded; into that twin one
quantized layer is put at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import UnsupportedModelError
from quasar.loop.checks import quantize
from quasar.progress import track
from quasar.protocols import Quantizer
from quasar.quantizers.unrounded import keeping_unrounded, unrounded_twin
from quasar.types import Quantized
from quasar.weights.layers import replace_module
from quasar.weights.linear import QuantizedLinear

_TOKENS = 64


@attrs.frozen
class LayerSensitivity:
    """What rounding one layer does.

    Args:
        name: Name of the module.
        bits: Bits of a weight.
        nbytes: Bytes of its record.
        output_error: Size of the change of its output as a share of the output's own (Frobenius norms), on inputs
            that no other layer's rounding has touched.
        kl: Mean of KL(unrounded ‖ this layer alone rounded) over tokens, in nats.
    """

    name: str
    bits: int
    nbytes: int
    output_error: float
    kl: float


@attrs.frozen
class SensitivityReport:
    """All layers, the one that costs most first.

    Args:
        tokens: Positions that the figures are means over.
        kl: The same with all layers rounded; the layers' own do not quite add up to it.
        layers: By falling ``kl``.
    """

    tokens: int
    kl: float
    layers: Sequence[LayerSensitivity]


@torch.no_grad()
def measure_sensitivity(
    model: nn.Module, quantizer: Quantizer, calibration: Sequence[Tensor] | None, *, tokens: int = _TOKENS
) -> tuple[Quantized, SensitivityReport]:
    """Quantize a model and measure each layer by itself: one forward over the tokens for each.

    Args:
        model: As for :meth:`quasar.protocols.Quantizer.quantize`; not mutated.
        calibration: ``[1, T]`` token ids each; quantized with, and the first of them measured on.
        tokens: How many of them to measure on, at most.

    Returns:
        What the quantizer made, and the report.

    Raises:
        UnsupportedModelError: There is no prompt to measure on, or the quantizer does not say what it rounded.
    """
    if not calibration:
        raise UnsupportedModelError("sensitivity is measured on prompts, and a model without a tokenizer has none")
    with keeping_unrounded() as kept:
        made = quantize(quantizer, model, calibration)
    quantized = made.model
    if not kept and any(isinstance(module, QuantizedLinear) for module in quantized.modules()):
        raise UnsupportedModelError(f"{type(quantizer).__name__} does not say what it rounded: it is no LayerQuantizer")
    twin, prompts = unrounded_twin(quantized, kept), _cut(calibration, tokens)
    errors = _output_errors(twin, quantized, list(kept), prompts)
    exact = _log_probs(twin, prompts)
    layers = [
        _with_one_layer(twin, quantized.get_submodule(name), name, errors.get(name, 0.0), prompts, exact)
        for name in track(list(kept), "measuring layers")
    ]
    layers.sort(key=lambda layer: -layer.kl)
    return made, SensitivityReport(len(exact), divergence(exact, _log_probs(quantized, prompts)), layers)


def divergence(exact: Tensor, other: Tensor) -> float:
    """Mean KL(exact ‖ other) of ``[n, V]`` log-probabilities.

    Σ p·(e^d − 1 − d) with d = other − exact: both sum to one, so this is Σ −p·d, but no term is negative and small
    divergences do not drown in the rounding of float32.
    """
    difference = (other - exact).nan_to_num(0.0)  # where both are −∞
    return float((exact.exp() * (difference.expm1() - difference)).sum(dim=-1).mean())


def _cut(calibration: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The first prompts, together no longer than ``tokens``; the last of them may be cut."""
    prompts: list[Tensor] = []
    for token_ids in calibration:
        left = tokens - sum(prompt.shape[1] for prompt in prompts)
        if left > 0:
            prompts.append(token_ids[:, :left])
    return prompts


def _log_probs(model: Any, prompts: Sequence[Tensor]) -> Tensor:
    """``[n, V]`` float32, all positions of all prompts."""
    logits = [model(input_ids=token_ids, use_cache=False).logits[0] for token_ids in prompts]
    return torch.cat(logits).float().log_softmax(dim=-1)


def _output_errors(
    twin: nn.Module, quantized: nn.Module, names: Sequence[str], prompts: Sequence[Tensor]
) -> dict[str, float]:
    """One run of the twin, in which each quantized layer is given the inputs of its unrounded one."""
    squares: dict[str, tuple[float, float]] = {}

    def compare(name: str, inputs: Tensor, outputs: Tensor) -> None:
        change = quantized.get_submodule(name)(inputs).float() - outputs.float()
        before = squares.get(name, (0.0, 0.0))
        squares[name] = (before[0] + float(change.square().sum()), before[1] + float(outputs.float().square().sum()))

    def hook_of(name: str) -> Any:
        return lambda _module, arguments, outputs: compare(name, arguments[0], outputs)

    hooks = [twin.get_submodule(name).register_forward_hook(hook_of(name)) for name in names]
    try:
        _log_probs(twin, prompts)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (change / max(size, 1e-30)) ** 0.5 for name, (change, size) in squares.items()}


def _with_one_layer(
    twin: nn.Module, layer: Any, name: str, output_error: float, prompts: Sequence[Tensor], exact: Tensor
) -> LayerSensitivity:
    """Put one quantized layer into the twin, run it, and put the unrounded one back."""
    unrounded = twin.get_submodule(name)
    replace_module(twin, name, layer)
    kl = divergence(exact, _log_probs(twin, prompts))
    replace_module(twin, name, unrounded)
    weight = layer.executor.weight
    return LayerSensitivity(name, weight.bits, weight.nbytes, output_error, kl)
