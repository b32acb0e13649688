"""AWQ, activation-aware weight quantization (Lin et al. 2023, arXiv 2306.00978): weights of few bits in groups.

A channel whose inputs are large is scaled up before its weights are rounded, so that they lose less, and its inputs are
scaled down, in the norm or the linear layer that makes them. How much is found by a search over calibration
activations. A second search clips groups of weights where a finer grid serves the outputs better than the largest
weights do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quasar.options import choice, flag, integer
from quasar.progress import track
from quasar.quantizers.assembly import Assembly, QuantizedCopy
from quasar.quantizers.options import activations as known_activations
from quasar.quantizers.options import check_group, group_size
from quasar.quantizers.smoothing import Fold, divide_norm
from quasar.quantizers.tracing import Group, trace_groups
from quasar.types import Quantized
from quasar.weights.layers import Layer, linear_layers
from quasar_awq.rounding import Grid
from quasar_awq.samples import sample_in_turns
from quasar_awq.scores import score_layers
from quasar_awq.search import best_scales, clip

_BITS = (8, 4, 3)


class AwqQuantizer:
    """Quantizes all linear layers to few bits, by what calibration says of their inputs.

    Args:
        bits: 8, 4 or 3.
        group: Weights of a row that share a scale; it divides the layer's inputs. −1: the whole row.
        sym: No zero points.
        clip: Search a limit for the weights of each group; not for the layers that make the scores of attention.
        grid: Steps of each search; 0: no scaling and no clipping, which is rounding to nearest.
        samples: Rows of each input that the searches see.
        activations: How inputs are rounded at run time: ``none``, ``int8_per_token`` or ``int8_per_group``.
        lm_head: Quantize the output head too. A head that shares its weight with the embedding gets one of its own.
        include: Patterns of layer names to quantize, as in ``*.mlp.*``, with ``|`` between them; none: all.
        exclude: Patterns of layer names to leave alone.
        kernel: Name of the kernel that executes the layers; ``"auto"`` takes the fastest for each.
    """

    def __init__(
        self,
        bits: int = 4,
        group: int = 128,
        sym: bool = False,
        clip: bool = True,
        grid: int = 20,
        samples: int = 512,
        activations: str = "none",
        lm_head: bool = False,
        include: str = "",
        exclude: str = "",
        kernel: str = "auto",
    ) -> None:
        bits = choice(*_BITS).accepted("bits", bits, who="awq")
        group = group_size.accepted("group", group, who="awq")
        flag().check("sym", sym, who="awq")
        flag().check("clip", clip, who="awq")
        self._steps: int = integer(at_least=0).accepted("grid", grid, who="awq")
        self._samples: int = integer(at_least=1).accepted("samples", samples, who="awq")
        known_activations.check("activations", activations, who="awq")
        self._grid, self._clip = Grid(bits, group, sym), clip
        self._activations: Any = activations
        self._assembly = Assembly("awq", lm_head=lm_head, include=include, exclude=exclude, kernel=kernel)

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`. Without calibration: rounded to nearest.

        Raises:
            InvalidRequestError: The group does not fit a layer; the message names it, before any weight is touched.
        """
        layers = self._assembly.choose(model)
        for layer in layers:
            check_group("awq", layer, self._grid.group)
        copy, clipped = self._assembly.begin(model), 0
        prompts = calibration if calibration and self._steps > 0 else ()
        folds = self._search_scales(model, copy.model, layers, prompts)
        inputs_of = self._inputs_to_clip(model, layers, prompts)
        for layer in track(layers, "quantizing"):
            inputs = inputs_of(layer)
            clipped += inputs is not None
            self._place(copy, layer, folds[layer.name], inputs)
        method = self._method(bool(prompts), searched=bool(copy.n_smoothed or clipped))
        facts = {"method": method, "scaled_layers": copy.n_smoothed, "clipped_layers": clipped}
        return copy.finish(self.describe(), facts)

    def describe(self) -> Mapping[str, Any]:
        """The options."""
        own = {
            "quantizer": "awq",
            "bits": self._grid.bits,
            "group": self._grid.group,
            "sym": self._grid.symmetric,
            "clip": self._clip,
            "grid": self._steps,
            "samples": self._samples,
            "activations": self._activations,
        }
        return own | self._assembly.describe()

    def _method(self, calibrated: bool, *, searched: bool) -> str:
        """Whether the weights were searched for or, for want of calibration, rounded to nearest."""
        if searched:
            return "activation-aware"
        reason = "no layer's input could be scaled" if calibrated else "there was no calibration"
        return f"rounded to nearest ({'grid=0' if self._steps == 0 else reason})"

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
        for layer, inputs in sample_in_turns(model, sampled, calibration, self._samples):
            group = by_first[layer.name]
            assert inputs is not None  # tracing saw it, on the same prompts
            weights = [consumer.weight for consumer in group.consumers.values()]
            scales = best_scales(weights, inputs, self._grid, self._steps)
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
        if not calibration or not self._clip:
            return lambda _: None
        scores = score_layers(model, list(linear_layers(model)), calibration[0])
        wanted = [layer for layer in layers if layer.name not in scores]
        samples = sample_in_turns(model, wanted, calibration, self._samples)
        return lambda layer: None if layer.name in scores else next(samples)[1]

    def _place(self, copy: QuantizedCopy, layer: Layer, fold: Fold, inputs: Tensor | None) -> None:
        weight = rounded = fold.apply(layer.weight)
        if inputs is not None:
            scaled = inputs.float() if fold.columns is None else inputs.float() / fold.columns
            rounded = clip(weight, scaled, self._grid, self._steps)
        record = self._grid.record(rounded, self._activations)
        bias, smoothed = fold.apply_to_bias(layer.bias), fold.columns is not None
        copy.place(layer, record, weight=weight, bias=bias, smoothed=smoothed)


def _within(group: Group, names: Any) -> bool:
    """Whether all that scaling a group changes is quantized here, or a norm."""
    return group.consumers.keys() <= names and (group.is_norm or group.name in names)
