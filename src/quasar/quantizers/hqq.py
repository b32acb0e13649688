"""HQQ, half-quadratic quantization, by the library hqq (Badri and Shaji 2023, "Half-Quadratic Quantization of Large
Machine Learning Models"): weights of few bits in groups, no calibration, activations as they are.

hqq finds integers, scales and zero points; they are carried over into :class:`QuantizedWeight`, so that Quasar's
kernels execute them. hqq's own forward maps the weight back at every call, which takes many times as long on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.options import choice, option
from quasar.quantizers.assembly import LayerQuantizer
from quasar.quantizers.options import activations as known_activations
from quasar.quantizers.options import check_group, group_size
from quasar.types import Quantized
from quasar.weights.layers import Layer
from quasar.weights.record import ActivationScheme, QuantizedWeight

_BITS = (8, 4, 3, 2)


@attrs.frozen
class HqqQuantizer(LayerQuantizer):
    """Quantizes all linear layers to few bits.

    Args:
        bits: 8, 4, 3 or 2.
        group: Weights that share a scale and a zero point; −1: a whole row. With ``axis=1`` it divides the layer's
            inputs.
        axis: 1: a group is a piece of a row, which belongs to one output. 0: it is a piece of a column, hqq's own
            default; its scales then take as much memory as the weights did.
        activations: How inputs are rounded at run time: ``"none"``, ``"int8_per_token"`` or ``"int8_per_group"``.
    """

    called = "hqq"
    bits: int = option(4, choice(*_BITS))
    group: int = option(64, group_size)
    axis: int = option(1, choice(0, 1))
    activations: ActivationScheme = attrs.field(default="none", validator=known_activations)

    def __attrs_post_init__(self) -> None:
        _library()  # refuse before a model is loaded

    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`. Calibration is not used.

        Raises:
            InvalidRequestError: The group does not fit a layer; the message names it, before any weight is touched.
        """
        layers = self.choose(model)
        for layer in layers:
            check_group(self.called, layer, self.group, axis=self.axis)
        return self.assemble(model, layers, self._quantize_layer)

    def _quantize_layer(self, layer: Layer) -> QuantizedWeight:
        record = quantize_hqq(layer.weight, bits=self.bits, group=self.group, axis=self.axis)
        return attrs.evolve(record, activations=self.activations)


def quantize_hqq(weight: Tensor, *, bits: int, group: int, axis: int) -> QuantizedWeight:
    """The record of what the library makes of an ``[out, in]`` weight.

    Its integers begin at 0; they and the zero points are moved down by half their range, so that 8 bits fit int8.
    """
    out, size = weight.shape
    length = group if group > 0 else (size if axis == 1 else out)
    integers, meta = _library().quantize(
        weight.float().contiguous(),
        nbits=bits,
        group_size=length,
        axis=axis,
        bitpack=False,
        compute_dtype=torch.float32,
        device=str(weight.device),
    )
    middle = 2 ** (bits - 1)
    values = (integers.reshape(out, size) - middle).to(torch.int8)
    scales, zero_points = (
        part.float().reshape(out, -1) if axis == 1 else part.float().expand(length, -1).reshape(out, size)
        for part in (meta["scale"], meta["zero"] - middle)
    )
    return QuantizedWeight(values, scales.contiguous(), zero_points.contiguous(), bits=bits)


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it imports deprecated parts of torch
        try:
            from hqq.core.quantize import Quantizer
        except ImportError as error:
            raise InvalidRequestError(
                f"the quantizer hqq needs the library ({error}); install it with: pip install 'quasar-decode[hqq]'"
            ) from error
    return Quantizer
