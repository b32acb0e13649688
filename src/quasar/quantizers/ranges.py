"""The range of each channel of a layer's input, observed on calibration prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import NumericalError
from quasar.progress import track
from quasar.weights.layers import Layer


@attrs.frozen(eq=False)
class Range:
    """Smallest and largest value of each channel.

    Args:
        low: ``[in]`` float32.
        high: ``[in]`` float32.
    """

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, inputs: Tensor) -> Range:
        """Of ``[..., in]`` inputs."""
        low, high = inputs.detach().flatten(0, -2).aminmax(dim=0)
        return cls(low.float(), high.float())

    def union(self, other: Range | None) -> Range:
        """The range of both."""
        if other is None:
            return self
        return Range(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    @property
    def peaks(self) -> Tensor:
        """``[in]``: the largest absolute values."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def middle(self) -> Tensor:
        """``[in]``: halfway between smallest and largest."""
        return (self.low + self.high) / 2

    def moved(self, shift: Tensor | None, scales: Tensor | None) -> Range:
        """The range of ``(inputs - shift) / scales``; ``None``: no shift, no scales."""
        low, high = self.low, self.high
        if shift is not None:
            low, high = low - shift, high - shift
        return Range(low, high) if scales is None else Range(low / scales, high / scales)


@torch.no_grad()
def input_ranges(model: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor]) -> dict[str, Range]:
    """Run the model on the calibration prompts; returns the range of the input of each layer, by name.

    Args:
        model: The full model; not mutated.
        calibration: ``[1, T]`` integer token ids each, at least one.

    Raises:
        NumericalError: An input is not finite, or a layer had none.
    """
    ranges: dict[str, Range] = {}

    def observe(name: str, inputs: Tensor) -> None:
        ranges[name] = Range.of(inputs).union(ranges.get(name))

    def hook_of(name: str) -> Any:
        return lambda _module, arguments: observe(name, arguments[0])

    hooks = [layer.module.register_forward_pre_hook(hook_of(layer.name)) for layer in layers]
    try:
        for token_ids in track(calibration, "measuring activations"):
            model(input_ids=token_ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        if layer.name not in ranges:
            raise NumericalError(f"{layer.name} had no input on the calibration prompts; leave it out with exclude")
        if not ranges[layer.name].peaks.isfinite().all():
            raise NumericalError(f"the input of {layer.name} is not finite on the calibration prompts")
    return ranges
