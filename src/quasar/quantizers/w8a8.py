"""W8A8, the recipe of Quasar (arXiv 2603.01399): int8 weights and int8 activations, smoothed.

Weights: symmetric, one scale an output channel. Activations: symmetric, one scale a token, found at run time.
Smoothing is folded into the norms (see :mod:`quasar.quantizers.smoothing`). Embeddings, norms, attention and the
key-value cache stay as they are, and so does the output head unless asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.progress import track
from quasar.quantizers.assembly import Assembly
from quasar.quantizers.layers import Layer, linear_layers
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
        if not isinstance(smooth, bool):
            raise InvalidRequestError(f"w8a8: smooth={smooth!r}, expected true or false")
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
            raise InvalidRequestError(f"w8a8: alpha={alpha!r}, expected a number from 0 to 1")
        self._smooth, self._alpha = smooth, float(alpha)
        self._assembly = Assembly("w8a8", lm_head=lm_head, include=include, exclude=exclude, kernel=kernel)

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> nn.Module:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`."""
        layers = self._assembly.choose(model)
        quantized = self._assembly.begin(model)
        folds = self._fold_smoothing(model, quantized, layers, calibration or ())
        for layer in track(layers, "quantizing"):
            self._place(quantized, layer, folds[layer.name])
        return self._assembly.finish(quantized)

    def describe(self) -> Mapping[str, Any]:
        """Options, and after :meth:`quantize` the layers with their kernels and the weights left alone with reasons."""
        shared = self._assembly.describe()
        smoothed = sum(layer["smoothed"] for layer in shared["layers"])
        own = {"quantizer": "w8a8", "smooth": self._smooth, "alpha": self._alpha, "smoothed_layers": smoothed}
        return own | shared

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

    def _place(self, quantized: nn.Module, layer: Layer, fold: Fold) -> None:
        weight = fold.apply(layer.weight)
        values, scales = quantize_symmetric(weight)
        record = QuantizedWeight(values, scales, bits=8, activations="int8_per_token")
        bias, smoothed = fold.apply_to_bias(layer.bias), fold.columns is not None
        self._assembly.place(quantized, layer, record, weight=weight, bias=bias, smoothed=smoothed)
