"""What every quantizer does around its arithmetic: choose layers, put records in their place, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from quasar.kernels import KernelChooser
from quasar.options import flag, option
from quasar.progress import track
from quasar.quantizers.unrounded import keep
from quasar.types import Quantized
from quasar.weights.layers import (
    Layer,
    LayerReport,
    Places,
    choose_layers,
    skipped_weights,
    structure_copy,
    untie_quantized_head,
)
from quasar.weights.linear import QuantizedLinear
from quasar.weights.record import QuantizedWeight


@attrs.frozen(kw_only=True)
class LayerQuantizer:
    """The options that quantizers of linear layers share, and what such a quantizer does around its arithmetic.

    A quantizer is an attrs class that inherits from this one: it says its name in ``called``, has fields for its own
    options, and the method ``quantize`` of :class:`quasar.protocols.Quantizer`. ``begin`` gives the copy of a model in
    the making; ``assemble`` makes all of it, for a quantizer that needs to see one layer at a time. Nothing of a model
    is remembered here.

    Args:
        lm_head: Quantize the output head too. A head that shares its weight with the embedding gets one of its own;
            the embedding keeps its values.
        include: Patterns of layer names to quantize, as in ``*.mlp.*``, with ``|`` between them; none: all.
        exclude: Patterns of layer names to leave alone.
        kernel: Name of the kernel that executes the layers; ``"auto"`` takes the fastest for each.

    Raises:
        InvalidRequestError: ``lm_head`` is no bool.
        UnknownStrategyError: No kernel has that name.
    """

    called: ClassVar[str]
    lm_head: bool = option(False, flag())
    include: str = attrs.field(default="", converter=str)
    exclude: str = attrs.field(default="", converter=str)
    kernel: str = attrs.field(default="auto", converter=str)
    _kernels: KernelChooser = attrs.field(init=False, repr=False, eq=False)

    @_kernels.default
    def _chooser(self) -> KernelChooser:
        return KernelChooser(self.kernel)

    def choose(self, model: nn.Module) -> list[Layer]:
        """The layers to quantize; raises as :func:`quasar.weights.layers.choose_layers` does."""
        return choose_layers(model, self.called, lm_head=self.lm_head, include=self.include, exclude=self.exclude)

    def begin(self, model: nn.Module) -> QuantizedCopy:
        """The copy of ``model`` in the making."""
        return QuantizedCopy(model, self._kernels)

    @torch.no_grad()
    def assemble(
        self, model: nn.Module, layers: Sequence[Layer], quantize: Callable[[Layer], QuantizedWeight]
    ) -> Quantized:
        """A quantized copy, each layer by itself, in the order of the modules."""
        copy = self.begin(model)
        for layer in track(layers, "quantizing"):
            copy.place(layer, quantize(layer))
        return copy.finish(self.describe())

    def describe(self) -> Mapping[str, Any]:
        """The name and the options, those of this quantizer alone first."""
        shared = attrs.fields_dict(LayerQuantizer)
        options = {field.name: getattr(self, field.name) for field in attrs.fields(type(self)) if field.init}
        return {"quantizer": self.called} | dict(sorted(options.items(), key=lambda option: option[0] in shared))


class QuantizedCopy:
    """A copy of a model in the making: ``place`` puts one record into it, ``finish`` closes it.

    Args:
        model: Is left as it is.
        kernels: Choose what executes a record.

    Attributes:
        model: The copy, which shares every tensor: replace tensors in it, never write to them.
        reports: One for each layer that was placed.
    """

    def __init__(self, model: nn.Module, kernels: KernelChooser) -> None:
        self.model: Any = structure_copy(model)
        self.reports: list[LayerReport] = []
        self._kernels = kernels
        self._places = Places(self.model)

    def place(
        self,
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
        self.reports.append(LayerReport.of(layer.name, original, record, name, smoothed=smoothed))
        bias = layer.bias if bias is None else bias
        keep(layer.name, original, bias)
        linear = QuantizedLinear(kernel.prepare(record), bias, name)
        self._places.replace(layer.name, linear)
        return linear

    @property
    def n_smoothed(self) -> int:
        """Layers into which a part of the activations' spread was moved."""
        return sum(report.smoothed for report in self.reports)

    def finish(
        self,
        options: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
        *,
        reasons: Mapping[str, str] | None = None,
    ) -> Quantized:
        """Tell a quantized head apart from the embedding, and report what became of the model.

        Args:
            options: What the quantizer describes of itself.
            facts: What it found out about this model.
            reasons: Why, by the name of a layer that was chosen and not placed.

        Returns:
            The copy, and a report of the options, the facts, the kernels, each layer, and what was left alone and why.
        """
        untie_quantized_head(self.model)
        skipped = skipped_weights(self.model, {report.name for report in self.reports}, reasons or {})
        report = {
            **options,
            **(facts or {}),
            "kernels": sorted({report.kernel for report in self.reports}),
            "layers": [attrs.asdict(report) for report in self.reports],
            "skipped": [attrs.asdict(part) for part in skipped],
        }
        return Quantized(self.model, report)
