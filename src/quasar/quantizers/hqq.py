"""HQQ, half-quadratic quantization, by the library hqq (Badri and Shaji 2023, "Half-Quadratic Quantization of Large
Machine Learning Models"): weights of few bits in groups, no calibration, activations as they are.

hqq finds integers, scales and zero points; they are carried over into :class:`QuantizedWeight`, so that Quasar's
kernels execute them. hqq's own forward maps the weight back at every call, which takes many times as long on a CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError
from quasar.options import choice
from quasar.quantizers.assembly import Assembly
from quasar.quantizers.options import activations as known_activations
from quasar.quantizers.options import check_group, group_size
from quasar.types import Quantized
from quasar.weights.layers import Layer
from quasar.weights.record import ActivationScheme, QuantizedWeight

_BITS = (8, 4, 3, 2)


class HqqQuantizer:
    """Quantizes all linear layers to few bits.

    Args:
        bits: 8, 4, 3 or 2.
        group: Weights that share a scale and a zero point; −1: a whole row. With ``axis=1`` it divides the layer's
            inputs.
        axis: 1: a group is a piece of a row, which belongs to one output. 0: it is a piece of a column, hqq's own
            default; its scales then take as much memory as the weights did.
        activations: How inputs are rounded at run time: ``"none"``, ``"int8_per_token"`` or ``"int8_per_group"``.
        lm_head: Quantize the output head too. A head that shares its weight with the embedding gets one of its own.
        include: Patterns of layer names to quantize, as in ``*.mlp.*``, with ``|`` between them; none: all.
        exclude: Patterns of layer names to leave alone.
        kernel: Name of the kernel that executes the layers; ``"auto"`` takes the fastest for each.
    """

    def __init__(
        self,
        bits: int = 4,
        group: int = 64,
        axis: int = 1,
        activations: ActivationScheme = "none",
        lm_head: bool = False,
        include: str = "",
        exclude: str = "",
        kernel: str = "auto",
    ) -> None:
        self._bits: int = choice(*_BITS).accepted("bits", bits, who="hqq")
        self._group: int = group_size.accepted("group", group, who="hqq")
        self._axis: int = choice(0, 1).accepted("axis", axis, who="hqq")
        known_activations.check("activations", activations, who="hqq")
        self._activations: ActivationScheme = activations
        self._assembly = Assembly("hqq", lm_head=lm_head, include=include, exclude=exclude, kernel=kernel)
        _library()  # refuse before a model is loaded

    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`. Calibration is not used.

        Raises:
            InvalidRequestError: The group does not fit a layer; the message names it, before any weight is touched.
        """
        layers = self._assembly.choose(model)
        for layer in layers:
            check_group("hqq", layer, self._group, axis=self._axis)
        return self._assembly.assemble(model, layers, self._quantize_layer, self.describe())

    def describe(self) -> Mapping[str, Any]:
        """The options."""
        return {
            "quantizer": "hqq",
            "bits": self._bits,
            "group": self._group,
            "axis": self._axis,
            "activations": self._activations,
            **self._assembly.describe(),
        }

    def _quantize_layer(self, layer: Layer) -> QuantizedWeight:
        record = quantize_hqq(layer.weight, bits=self._bits, group=self._group, axis=self._axis)
        return attrs.evolve(record, activations=self._activations)


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
