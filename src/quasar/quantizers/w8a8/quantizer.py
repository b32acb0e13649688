"""W8A8, the recipe of Quasar (arXiv 2603.01399): int8 weights and int8 activations, smoothed.

Weights: symmetric, one scale an output channel. Activations: symmetric, one scale a token, found at run time. Both may
have a scale for each group of inputs instead, and activations one for the layer, found in calibration.
Smoothing is folded into the norms (see :mod:`quasar.quantizers.smoothing`). Embeddings, norms, attention and the
key-value cache stay as they are, and so does the output head unless asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.options import Expectation, choice, number, option
from quasar.progress import track
from quasar.quantizers.assembly import LayerQuantizer, QuantizedCopy
from quasar.quantizers.options import check_group, checked_prompts, group_size
from quasar.quantizers.ranges import Range, input_ranges
from quasar.quantizers.smoothing import Fold, divide_norm, smoothing_scales
from quasar.quantizers.tracing import Group, trace_groups
from quasar.quantizers.w8a8.scale_search import SAMPLED_ROWS, searched_scales
from quasar.quantizers.w8a8.scheme import Int8Scheme
from quasar.quantizers.w8a8.shifting import shift_norm
from quasar.types import Quantized
from quasar.weights.layers import Layer, linear_layers

_SMOOTHING = choice("scale", "shift", "none")
_SHARE = number(at_least=0, at_most=1)
_ENOUGH_PROMPTS = 4
_ALPHA = Expectation(f"{_SHARE.expected}, or search", lambda value: value == "search" or _SHARE.holds(value))


def _named_smoothing(value: object) -> object:
    """True and False stand for two of the names."""
    return {True: "scale", False: "none"}[value] if isinstance(value, bool) else value


@attrs.frozen
class W8A8Quantizer(LayerQuantizer):
    """Quantizes all linear layers to 8 bits.

    Args:
        group: Inputs that share a scale, of weights and of activations, and that divide the layer's inputs; −1: all.
        smooth: What to do to each channel where calibration is given. ``"scale"``: divide it; ``"shift"``: move the
            middle of its range to zero, where a norm precedes, then divide it; ``"none"``: nothing. ``True`` is
            ``"scale"``, ``False`` is ``"none"``.
        alpha: Migration strength of the smoothing, 0…1: how much of the activations' spread moves into the weights.
            ``"search"``: for each group of layers the one with which their outputs err least.
        activations: ``"dynamic"``: each row of activations has scales of its own; ``"static"``: one scale a layer,
            from calibration, which is then needed.
    """

    called = "w8a8"
    group: int = option(-1, group_size)
    smooth: str = attrs.field(default="scale", validator=_SMOOTHING, converter=_named_smoothing)
    alpha: float | str = option(0.5, _ALPHA)
    activations: str = option("dynamic", choice("dynamic", "static"))

    @property
    def enough_prompts(self) -> int | None:
        """What is the largest input of a channel shows in few tokens; a search or a static scale gains from more."""
        return None if self.alpha == "search" or self.activations == "static" else _ENOUGH_PROMPTS

    @property
    def scheme(self) -> Int8Scheme:
        """How a layer is rounded."""
        return Int8Scheme(self.group, static=self.activations == "static")

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`.

        Raises:
            InvalidRequestError: The group does not fit a layer, a calibration prompt does not fit the model, or static
                activations lack calibration; before any weight is touched.
        """
        layers = self.choose(model)
        for layer in layers:
            check_group(self.called, layer, self.group)
        prompts = checked_prompts(self.called, model, calibration)
        ranges = self._measure_inputs(model, layers, prompts)
        copy = self.begin(model)
        folds = self._fold_smoothing(model, copy.model, layers, prompts)
        for layer in track(layers, "quantizing"):
            self._place(copy, layer, folds[layer.name], ranges.get(layer.name))
        return copy.finish(self.describe(), {"smoothed_layers": copy.n_smoothed})

    def _measure_inputs(
        self, model: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor]
    ) -> dict[str, Range]:
        """What static activations need to know, and nothing where they are dynamic."""
        if not self.scheme.static:
            return {}
        if not calibration:
            raise InvalidRequestError(
                "w8a8: activations=static needs calibration prompts, and there are none (nor for a model without a "
                "tokenizer); choose activations=dynamic"
            )
        return input_ranges(model, layers, calibration)

    def _fold_smoothing(
        self, model: nn.Module, quantized: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor]
    ) -> dict[str, Fold]:
        """Divide and shift the norms of ``quantized``; returns what is left to do to each layer."""
        folds = {layer.name: Fold() for layer in layers}
        if self.smooth == "none" or not calibration:
            return folds
        rows = -(-SAMPLED_ROWS // len(calibration)) if self.alpha == "search" else 0
        for group in trace_groups(model, list(linear_layers(model)), calibration, rows=rows):
            if not group.consumers.keys() <= folds.keys():
                continue
            shift = self._shift_of(group)
            scales = self._scales_of(group, shift)
            if group.is_norm:
                if not divide_norm(quantized.get_submodule(group.name), scales):
                    continue
                shift = None if shift is None else shift_norm(quantized, group.name, shift, scales)
            elif group.name in folds:
                folds[group.name].rows = 1 / scales
            else:
                continue
            for name in group.consumers:
                folds[name].columns, folds[name].shift = scales, shift
        return folds

    def _shift_of(self, group: Group) -> Tensor | None:
        """``[in]``; a product of two layers' outputs cannot be shifted by either."""
        if self.smooth != "shift" or not group.is_norm or group.range is None:
            return None
        return group.range.middle.nan_to_num(0.0, 0.0, 0.0)

    def _scales_of(self, group: Group, shift: Tensor | None) -> Tensor:
        if self.alpha == "search":
            return searched_scales(group, self.scheme, shift)
        peaks = None if shift is None or group.range is None else group.range.moved(shift, None).peaks
        return smoothing_scales(group, float(self.alpha), peaks)

    def _place(self, copy: QuantizedCopy, layer: Layer, fold: Fold, inputs: Range | None) -> None:
        weight = fold.apply(layer.weight)
        peak = None if inputs is None else inputs.moved(fold.shift, fold.columns).peaks.amax()
        record = self.scheme.record(weight, peak)
        bias, smoothed = fold.apply_to_bias(layer.bias, layer.weight), fold.columns is not None
        copy.place(layer, record, weight=weight, bias=bias, smoothed=smoothed)
