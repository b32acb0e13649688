"""What every quantizer does around its arithmetic: choose layers, put records in their place, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.kernels import KernelChooser
from quasar.progress import track
from quasar.quantizers.unrounded import keep
from quasar.weights.layers import (
    Layer,
    LayerReport,
    Skipped,
    choose_layers,
    replace_module,
    skipped_weights,
    structure_copy,
    untie_quantized_head,
)
from quasar.weights.linear import QuantizedLinear
from quasar.weights.record import QuantizedWeight


class Assembly:
    """The options that quantizers share, and the quantized copy in the making.

    ``begin`` gives a copy and its layers; ``place`` puts one record into the copy; ``finish`` closes it. ``assemble``
    is all three for a quantizer that needs to see one layer at a time.

    Args:
        who: Name of the quantizer, for messages.
        lm_head: Quantize the output head too. A head that shares its weight with the embedding gets one of its own;
            the embedding keeps its values.
        include: Patterns of layer names to quantize, as in ``*.mlp.*``, with ``|`` between them; none: all.
        exclude: Patterns of layer names to leave alone.
        kernel: Name of the kernel that executes the layers; ``"auto"`` takes the fastest for each.

    Raises:
        InvalidRequestError: ``lm_head`` is no bool.
        UnknownStrategyError: No kernel has that name.
    """

    def __init__(
        self, who: str, *, lm_head: bool = False, include: str = "", exclude: str = "", kernel: str = "auto"
    ) -> None:
        if not isinstance(lm_head, bool):
            raise InvalidRequestError(f"{who}: lm_head={lm_head!r}, expected true or false")
        self.who = who
        self._lm_head, self._include, self._exclude = lm_head, str(include), str(exclude)
        self._kernel = str(kernel)
        self._kernels = KernelChooser(self._kernel)
        self._reports: list[LayerReport] = []
        self._skipped: list[Skipped] = []

    def choose(self, model: nn.Module) -> list[Layer]:
        """The layers to quantize; raises as :func:`quasar.weights.layers.choose_layers` does."""
        return choose_layers(model, self.who, lm_head=self._lm_head, include=self._include, exclude=self._exclude)

    def begin(self, model: nn.Module) -> Any:
        """A copy of ``model`` that shares every tensor with it: replace tensors in it, never write to them."""
        self._reports, self._skipped = [], []
        return structure_copy(model)

    def place(
        self,
        quantized: nn.Module,
        layer: Layer,
        record: QuantizedWeight,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        smoothed: bool = False,
    ) -> QuantizedLinear:
        """Put a record in the place of a layer, and report it.

        Args:
            weight: ``[out, in]``, what the record approximates; ``None``: the layer's own.
            bias: ``[out]``; ``None``: the layer's own.
            smoothed: Whether a part of the activations' spread was moved into ``weight``.
        """
        name, kernel = self._kernels.choose(record)
        original = layer.weight if weight is None else weight
        self._reports.append(LayerReport.of(layer.name, original, record, name, smoothed=smoothed))
        bias = layer.bias if bias is None else bias
        keep(layer.name, original, bias)
        linear = QuantizedLinear(kernel.prepare(record), bias, name)
        replace_module(quantized, layer.name, linear)
        return linear

    def finish(self, quantized: nn.Module, reasons: Mapping[str, str] | None = None) -> nn.Module:
        """Tell a quantized head apart from the embedding, and list what was left alone.

        Args:
            reasons: Why, by the name of a layer that was chosen and not placed.
        """
        untie_quantized_head(quantized)
        self._skipped = skipped_weights(quantized, {report.name for report in self._reports}, reasons or {})
        return quantized

    @torch.no_grad()
    def assemble(
        self, model: nn.Module, layers: Sequence[Layer], quantize: Callable[[Layer], QuantizedWeight]
    ) -> nn.Module:
        """A quantized copy, each layer by itself, in the order of the modules."""
        quantized = self.begin(model)
        for layer in track(layers, "quantizing"):
            self.place(quantized, layer, quantize(layer))
        return self.finish(quantized)

    def describe(self) -> dict[str, Any]:
        """The shared options, and after a quantizing its layers, their kernels, and what was left alone and why."""
        return {
            "lm_head": self._lm_head,
            "include": self._include,
            "exclude": self._exclude,
            "kernel": self._kernel,
            "kernels": sorted({report.kernel for report in self._reports}),
            "layers": [attrs.asdict(report) for report in self._reports],
            "skipped": [attrs.asdict(skipped) for skipped in self._skipped],
        }
