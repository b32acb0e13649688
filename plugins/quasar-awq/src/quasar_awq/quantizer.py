"""AWQ, activation-aware weight quantization (Lin et al. 2023, arXiv 2306.00978): weights of few bits in groups.

A channel whose inputs are large is scaled up before its weights are rounded, so that they lose less, and its inputs are
scaled down, in the norm or the linear layer that makes them. How much is found by a search over calibration
activations. A second search clips groups of weights where a finer grid serves the outputs better than the largest
weights do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.options import choice, flag, integer, option
from quasar.progress import track
from quasar.quantizers.assembly import LayerQuantizer, QuantizedCopy
from quasar.quantizers.options import activations as known_activations
from quasar.quantizers.options import check_group, checked_prompts, group_size
from quasar.quantizers.smoothing import Fold, divide_norm
from quasar.quantizers.tracing import Group, trace_groups
from quasar.types import Quantized
from quasar.weights.layers import Layer, linear_layers
from quasar.weights.record import ActivationScheme
from quasar_awq.rounding import Grid
from quasar_awq.samples import sample_in_turns
from quasar_awq.scores import score_layers
from quasar_awq.search import best_scales, clip


@attrs.frozen
class AwqQuantizer(LayerQuantizer):
    """Quantizes all linear layers to few bits, by what calibration says of their inputs.

    Args:
        bits: 8, 4 or 3.
        group: Weights of a row that share a scale; it divides the layer's inputs. −1: the whole row.
        sym: No zero points.
        clip: Search a limit for the weights of each group; not for the layers that make the scores of attention.
        grid: Steps of each search; 0: no scaling and no clipping, which is rounding to nearest.
        samples: Rows of each input that the searches see.
        activations: How inputs are rounded at run time: ``none``, ``int8_per_token`` or ``int8_per_group``.
    """

    called = "awq"
    bits: int = option(4, choice(8, 4, 3))
    group: int = option(128, group_size)
    sym: bool = option(False, flag())
    clip: bool = option(True, flag())
    grid: int = option(20, integer(at_least=0))
    samples: int = option(512, integer(at_least=1))
    activations: ActivationScheme = attrs.field(default="none", validator=known_activations)

    @property
    def values(self) -> Grid:
        """What weights are rounded to."""
        return Grid(self.bits, self.group, self.sym)

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`. Without calibration: rounded to nearest.

        Raises:
            InvalidRequestError: The group does not fit a layer, or a calibration prompt does not fit the model; before
                any weight is touched.
        """
        layers = self.choose(model)
        for layer in layers:
            check_group(self.called, layer, self.group)
        prompts = checked_prompts(self.called, model, calibration) if self.grid > 0 else ()
        copy, clipped = self.begin(model), 0
        folds = self._search_scales(model, copy.model, layers, prompts)
        inputs_of = self._inputs_to_clip(model, layers, prompts)
        for layer in track(layers, "quantizing"):
            inputs = inputs_of(layer)
            clipped += inputs is not None
            self._place(copy, layer, folds[layer.name], inputs)
        method = self._method(bool(prompts), searched=bool(copy.n_smoothed or clipped))
        facts = {"method": method, "scaled_layers": copy.n_smoothed, "clipped_layers": clipped}
        return copy.finish(self.describe(), facts)

    def _method(self, calibrated: bool, *, searched: bool) -> str:
        """Whether the weights were searched for or, for want of calibration, rounded to nearest."""
        if searched:
            return "activation-aware"
        reason = "no layer's input could be scaled" if calibrated else "there was no calibration"
        return f"rounded to nearest ({'grid=0' if self.grid == 0 else reason})"

    def _search_scales(
        self, model: nn.Module, quantized: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor]
    ) -> dict[str, Fold]:
        """Divide the norms of ``quantized``; returns what is left to do to the weight of each layer.

        Rows of a producer that is a linear layer are divided after its own search. That changes none of its
        roundings, as scales belong to rows.
        """
        folds = {layer.name: Fold() for layer in layers}
        if not calibration:
            return folds
        groups = trace_groups(model, list(linear_layers(model)), calibration)
        by_first = {next(iter(group.consumers)): group for group in groups if _within(group, folds.keys())}
        sampled = [layer for layer in layers if layer.name in by_first]  # the others of a group have the same input
        for layer, inputs in sample_in_turns(model, sampled, calibration, self.samples):
            group = by_first[layer.name]
            assert inputs is not None  # tracing saw it, on the same prompts
            weights = [consumer.weight for consumer in group.consumers.values()]
            scales = best_scales(weights, inputs, self.values, self.grid)
            if not group.is_norm:
                folds[group.name].rows = 1 / scales
            elif not divide_norm(quantized.get_submodule(group.name), scales):
                continue
            for name in group.consumers:
                folds[name].columns = scales
        return folds

    def _inputs_to_clip(
        self, model: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor]
    ) -> Callable[[Layer], Tensor | None]:
        """Of each layer, called in their order: a sample of its inputs; ``None``: it is not to be clipped."""
        if not calibration or not self.clip:
            return lambda _: None
        scores = score_layers(model, list(linear_layers(model)), calibration[0])
        wanted = [layer for layer in layers if layer.name not in scores]
        samples = sample_in_turns(model, wanted, calibration, self.samples)
        return lambda layer: None if layer.name in scores else next(samples)[1]

    def _place(self, copy: QuantizedCopy, layer: Layer, fold: Fold, inputs: Tensor | None) -> None:
        weight = rounded = fold.apply(layer.weight)
        if inputs is not None:
            scaled = inputs.float() if fold.columns is None else inputs.float() / fold.columns
            rounded = clip(weight, scaled, self.values, self.grid)
        record = self.values.record(rounded, self.activations)
        bias, smoothed = fold.apply_to_bias(layer.bias), fold.columns is not None
        copy.place(layer, record, weight=weight, bias=bias, smoothed=smoothed)


def _within(group: Group, names: Any) -> bool:
    """Whether all that scaling a group changes is quantized here, or a norm."""
    return group.consumers.keys() <= names and (group.is_norm or group.name in names)
