"""Linear layers in floating point whose rows have the same bits at any width while a draft is verified."""

from __future__ import annotations

from torch import Tensor, nn

from quasar.verifiers.attention import is_attending_by_rows
from quasar.weights.layers import Layer, Places, linear_layers
from quasar.weights.products import is_faster_in_panels, product_in_panels


class FixedPanels(nn.Module):
    """A linear layer that runs on panels of as many rows while a draft is verified, and as ever on a prompt."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer
        self.weight, self.bias = layer.module.weight, layer.module.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if not is_attending_by_rows():
            # A prompt is computed once and in one piece, whatever is drafted.
            return self._layer.module(inputs)  # type: ignore[no-any-return]
        return product_in_panels(inputs, self._layer.weight, self._layer.bias)


def use_fixed_panels(model: nn.Module, *, only_where_faster: bool = False) -> None:
    """Replace the floating-point linear layers of ``model``, which shares its tensors with nobody's modules."""
    places = Places(model)
    for layer in list(linear_layers(model)):
        if is_faster_in_panels(layer.weight) or not only_where_faster:
            places.replace(layer.name, FixedPanels(layer))
