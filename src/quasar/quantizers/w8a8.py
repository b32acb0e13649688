"""W8A8, the recipe of Quasar (arXiv 2603.01399): int8 weights and int8 activations, smoothed.

Weights: symmetric, one scale an output channel. Activations: symmetric, one scale a token, found at run time.
Smoothing is folded into the norms (see :mod:`quasar.quantizers.smoothing`). Embeddings, norms, attention and the
key-value cache stay as they are, and so does the output head unless asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.kernels import KernelChooser
from quasar.quantizers.layers import (
    Layer,
    LayerReport,
    Skipped,
    choose_layers,
    linear_layers,
    replace_layers,
    structure_copy,
)
from quasar.quantizers.linear import QuantizedLinear
from quasar.quantizers.smoothing import Fold, divide_norm, smoothing_scales
from quasar.quantizers.tracing import trace_groups
from quasar.quantizers.weight import QuantizedWeight, quantize_symmetric


class W8A8Quantizer:
    """Quantizes all linear layers to 8 bits.

    Args:
        smooth: Smooth where calibration is given.
        alpha: Migration strength of the smoothing, 0…1: how much of the activations' spread moves into the weights.
        lm_head: Quantize the output head too. A head that shares its weight with the embedding gets one of its own;
            the embedding keeps its values.
        include: Patterns of layer names to quantize, as in ``*.mlp.*``, with ``|`` between them; none: all.
        exclude: Patterns of layer names to leave alone.
        kernel: Name of the kernel that executes the layers; ``"auto"`` takes the fastest for each.
    """

    def __init__(
        self,
        smooth: bool = True,
        alpha: float = 0.5,
        lm_head: bool = False,
        include: str = "",
        exclude: str = "",
        kernel: str = "auto",
    ) -> None:
        for name, value in (("smooth", smooth), ("lm_head", lm_head)):
            if not isinstance(value, bool):
                raise InvalidRequestError(f"w8a8: {name}={value!r}, expected true or false")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise InvalidRequestError(f"w8a8: alpha={alpha!r}, expected a number from 0 to 1")
        self._smooth, self._alpha, self._lm_head = smooth, float(alpha), lm_head
        self._include, self._exclude = str(include), str(exclude)
        self._kernels = KernelChooser(str(kernel))
        self._layers: list[LayerReport] = []
        self._skipped: list[Skipped] = []

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> nn.Module:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`."""
        layers = choose_layers(model, "w8a8", lm_head=self._lm_head, include=self._include, exclude=self._exclude)
        quantized = structure_copy(model)
        folds = self._fold_smoothing(model, quantized, layers, calibration or ())
        self._layers = []
        self._skipped = replace_layers(quantized, layers, lambda layer: self._quantize_layer(layer, folds[layer.name]))
        return quantized  # type: ignore[no-any-return]

    def describe(self) -> Mapping[str, Any]:
        """Options, and after :meth:`quantize` the layers with their kernels and the weights left alone with reasons."""
        return {
            "quantizer": "w8a8",
            "smooth": self._smooth,
            "alpha": self._alpha,
            "lm_head": self._lm_head,
            "include": self._include,
            "exclude": self._exclude,
            "kernels": sorted({layer.kernel for layer in self._layers}),
            "smoothed_layers": sum(layer.smoothed for layer in self._layers),
            "layers": [attrs.asdict(layer) for layer in self._layers],
            "skipped": [attrs.asdict(skipped) for skipped in self._skipped],
        }

    def _fold_smoothing(
        self, model: nn.Module, quantized: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor]
    ) -> dict[str, Fold]:
        """Divide the norms of ``quantized``; returns what is left to do to the weight of each layer."""
        folds = {layer.name: Fold() for layer in layers}
        if not self._smooth or not calibration:
            return folds
        for group in trace_groups(model, list(linear_layers(model)), calibration):
            if not group.consumers.keys() <= folds.keys():
                continue
            scales = smoothing_scales(group, self._alpha)
            if group.is_norm:
                if not divide_norm(quantized.get_submodule(group.name), scales):
                    continue
            elif group.name in folds:
                folds[group.name].rows = 1 / scales
            else:
                continue
            for name in group.consumers:
                folds[name].columns = scales
        return folds

    def _quantize_layer(self, layer: Layer, fold: Fold) -> QuantizedLinear:
        weight = fold.apply(layer.weight)
        values, scales = quantize_symmetric(weight)
        record = QuantizedWeight(values, scales, bits=8, activations="int8_per_token")
        name, kernel = self._kernels.choose(record)
        smoothed = fold.columns is not None
        self._layers.append(LayerReport.of(layer.name, weight, record, name, smoothed=smoothed))
        return QuantizedLinear(kernel.prepare(record), fold.apply_to_bias(layer.bias))
