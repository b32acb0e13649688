"""The quantizer ``gptq``: weights of few bits, chosen so that layers say the same of the inputs of calibration."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.options import choice, flag, number, option
from quasar.progress import track
from quasar.quantizers.assembly import LayerQuantizer
from quasar.quantizers.options import activations as known_activations
from quasar.quantizers.options import check_group, checked_prompts, group_size
from quasar.types import Quantized
from quasar.weights.layers import Layer
from quasar.weights.record import ActivationScheme, QuantizedWeight
from quasar_gptq.observing import blocks_of, observe_in_turn
from quasar_gptq.solver import quantize_gptq


@attrs.frozen
class GptqQuantizer(LayerQuantizer):
    """Quantizes all linear layers to few bits by GPTQ (arXiv 2210.17323), one decoder layer after the other.

    The inputs of a decoder layer are those that it gets from the ones before it when these are quantized already.
    Without calibration nothing is known of them, and weights are rounded to nearest.

    Args:
        bits: 2, 3, 4 or 8.
        group: Inputs of a layer that share a scale; −1: all. It divides the inputs of each layer.
        sym: Grids that reach as far down as up, without zero points; else from the least to the largest weight.
        act_order: Round the weights of the largest inputs first, when there is most left to make up for their errors
            (``desc_act`` in checkpoints).
        damp: Share of the mean of the Hessian's diagonal that is added to it, between 0 and 1.
        activations: What inputs are rounded to: "none", "int8_per_token", or "int8_per_group", which ``act_order``
            rules out.
    """

    called = "gptq"
    bits: int = option(4, choice(2, 3, 4, 8))
    group: int = option(128, group_size)
    sym: bool = option(False, flag())
    act_order: bool = option(False, flag())
    damp: float = option(0.1, number(above=0, below=1))
    activations: ActivationScheme = attrs.field(default="none", validator=known_activations)

    def __attrs_post_init__(self) -> None:
        if self.act_order and self.activations == "int8_per_group":
            raise InvalidRequestError(
                "gptq: act_order=true with activations='int8_per_group': a group's inputs would not lie together; "
                "choose one of the two, or 'int8_per_token'"
            )

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`.

        Raises:
            InvalidRequestError: The group does not fit a layer, or a calibration prompt does not fit the model; before
                any weight is touched.
            NumericalError: Also where the calibration prompts lead to inputs that are not finite.
        """
        layers = self.choose(model)
        for layer in layers:
            check_group(self.called, layer, self.group)
        prompts = checked_prompts(self.called, model, calibration)
        calibrated, copy = 0, self.begin(model)
        blocks = blocks_of(model, layers)
        with closing(observe_in_turn(copy.model, blocks, prompts)) as observed:
            for _, (block, hessians) in zip(track(blocks, "quantizing"), observed, strict=False):
                calibrated += len(hessians)
                for layer in block.layers:
                    copy.place(layer, self._record(layer, hessians.pop(layer.name, None)))
        facts = {"calibrated_layers": calibrated, "rounding": _rounding(calibrated, len(copy.reports))}
        return copy.finish(self.describe(), facts)

    def _record(self, layer: Layer, hessian: Tensor | None) -> QuantizedWeight:
        return quantize_gptq(
            layer.weight,
            hessian,
            bits=self.bits,
            group=layer.weight.shape[1] if self.group == -1 else self.group,
            symmetric=self.sym,
            act_order=self.act_order,
            damp=self.damp,
            activations=self.activations,
        )


def _rounding(calibrated: int, n_layers: int) -> str:
    """How many layers saw calibration, in words; the others are rounded to nearest."""
    if calibrated == n_layers:
        return "by GPTQ"
    if calibrated == 0:
        return "to nearest: no layer saw calibration"
    return f"by GPTQ; to nearest in {n_layers - calibrated} layers that calibration did not reach"
