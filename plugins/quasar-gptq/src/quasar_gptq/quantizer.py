"""The quantizer ``gptq``: weights of few bits, chosen so that layers say the same of the inputs of calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.options import choice, flag, number
from quasar.progress import track
from quasar.quantizers.assembly import Assembly
from quasar.quantizers.options import activations as known_activations
from quasar.quantizers.options import check_group, group_size
from quasar.types import Quantized
from quasar.weights.layers import Layer
from quasar.weights.record import ActivationScheme, QuantizedWeight
from quasar_gptq.observing import blocks_of, observe_in_turn
from quasar_gptq.solver import quantize_gptq

_BITS = (2, 3, 4, 8)


class GptqQuantizer:
    """Quantizes all linear layers to few bits by GPTQ (arXiv 2210.17323), block by block.

    The inputs of a block are those that it gets from the blocks before it when these are quantized already. Without
    calibration nothing is known of them, and weights are rounded to nearest.

    Args:
        bits: 2, 3, 4 or 8.
        group: Inputs of a layer that share a scale; −1: all. It divides the inputs of each layer.
        sym: Grids that reach as far down as up, without zero points; else from the least to the largest weight.
        act_order: Round the weights of the largest inputs first, when there is most left to make up for their errors
            (``desc_act`` in checkpoints).
        damp: Share of the mean of the Hessian's diagonal that is added to it, between 0 and 1.
        activations: What inputs are rounded to: "none", "int8_per_token", or "int8_per_group", which ``act_order``
            rules out.
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
        act_order: bool = False,
        damp: float = 0.1,
        activations: ActivationScheme = "none",
        lm_head: bool = False,
        include: str = "",
        exclude: str = "",
        kernel: str = "auto",
    ) -> None:
        self._bits: int = choice(*_BITS).accepted("bits", bits, who="gptq")
        self._group: int = group_size.accepted("group", group, who="gptq")
        flag().check("sym", sym, who="gptq")
        flag().check("act_order", act_order, who="gptq")
        damp = number(above=0, below=1).accepted("damp", damp, who="gptq")
        known_activations.check("activations", activations, who="gptq")
        if act_order and activations == "int8_per_group":
            raise InvalidRequestError(
                "gptq: act_order=true with activations='int8_per_group': a group's inputs would not lie together; "
                "choose one of the two, or 'int8_per_token'"
            )
        self._symmetric, self._act_order = sym, act_order
        self._damp, self._activations = float(damp), activations
        self._assembly = Assembly("gptq", lm_head=lm_head, include=include, exclude=exclude, kernel=kernel)

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`.

        Raises:
            InvalidRequestError: The group does not fit a layer; the message names it, before any weight is touched.
            NumericalError: Also where the calibration prompts lead to inputs that are not finite.
        """
        layers = self._assembly.choose(model)
        for layer in layers:
            check_group("gptq", layer, self._group)
        calibrated, copy = 0, self._assembly.begin(model)
        blocks = blocks_of(model, layers)
        with closing(observe_in_turn(copy.model, blocks, calibration or ())) as observed:
            for _, (block, hessians) in zip(track(blocks, "quantizing"), observed, strict=False):
                calibrated += len(hessians)
                for layer in block.layers:
                    copy.place(layer, self._record(layer, hessians.pop(layer.name, None)))
        facts = {"calibrated_layers": calibrated, "rounding": _rounding(calibrated, len(copy.reports))}
        return copy.finish(self.describe(), facts)

    def describe(self) -> Mapping[str, Any]:
        """The options."""
        own = {
            "quantizer": "gptq",
            "bits": self._bits,
            "group": self._group,
            "sym": self._symmetric,
            "act_order": self._act_order,
            "damp": self._damp,
            "activations": self._activations,
        }
        return own | self._assembly.describe()

    def _record(self, layer: Layer, hessian: Tensor | None) -> QuantizedWeight:
        return quantize_gptq(
            layer.weight,
            hessian,
            bits=self._bits,
            group=layer.weight.shape[1] if self._group == -1 else self._group,
            symmetric=self._symmetric,
            act_order=self._act_order,
            damp=self._damp,
            activations=self._activations,
        )


def _rounding(calibrated: int, n_layers: int) -> str:
    """How many layers saw calibration, in words; the others are rounded to nearest."""
    if calibrated == n_layers:
        return "by GPTQ"
    if calibrated == 0:
        return "to nearest: no layer saw calibration"
    return f"by GPTQ; to nearest in {n_layers - calibrated} layers that calibration did not reach"
