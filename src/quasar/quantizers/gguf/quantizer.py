"""The weights of a ``.gguf`` file as they are stored: nothing is rounded a second time.

transformers maps the blocks of a file back to floating point when it loads a model. This quantizer goes back to the
file and takes the blocks themselves, so that the quantized model computes with exactly the weights of the full one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.progress import track
from quasar.quantizers.assembly import LayerQuantizer
from quasar.quantizers.gguf.blocks import BLOCK_FORMATS, record_of
from quasar.quantizers.gguf.file import GgufFile, Stored
from quasar.quantizers.options import activations as known_activations
from quasar.types import Quantized
from quasar.weights.layers import Layer
from quasar.weights.provenance import source_of
from quasar.weights.record import ActivationScheme, QuantizedWeight


@attrs.frozen
class GgufQuantizer(LayerQuantizer):
    """Takes all linear layers from the file that the model was loaded from, where it stores them as blocks.

    The types are Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and Q2_K to Q6_K. A layer of another type is left alone.
    With ``lm_head``, a head that shares its weight with the embedding gets the embedding's blocks.

    Args:
        file: Path of the ``.gguf`` file; none: the one that the model was loaded from.
        activations: How the inputs of a layer are rounded: ``"none"``, ``"int8_per_token"`` or ``"int8_per_group"``.
            The last is about what llama.cpp does: there, groups are blocks of 32, or of 256 for the types with a K.
    """

    called = "gguf"
    file: str = attrs.field(default="", converter=str)
    activations: ActivationScheme = attrs.field(default="none", validator=known_activations)

    def __attrs_post_init__(self) -> None:
        if find_spec("gguf") is None:
            raise InvalidRequestError(
                "the quantizer gguf needs the package gguf; install it with: pip install 'quasar-decode[gguf]'"
            )
        if self.file and not self._named_path.is_file():
            raise InvalidRequestError(f"gguf: there is no file {self._named_path}")

    @torch.no_grad()
    def quantize(self, model: nn.Module, calibration: Sequence[Tensor] | None = None) -> Quantized:
        """Return the quantized copy; see :class:`quasar.protocols.Quantizer`. Calibration is not used.

        Raises:
            InvalidRequestError: A layer of the model is not what the file stores.
            UnsupportedModelError: There is no file to read, or it has no layer in blocks of a type that is known here.
        """
        layers = self.choose(model)
        file = GgufFile(self._path_for(model), model)
        copy, reasons, types = self.begin(model), {}, Counter[str]()
        for layer in track(layers, "reading"):
            stored = file.find(layer)
            if stored is None or stored.type_name not in BLOCK_FORMATS:
                reasons[layer.name] = f"stored as {stored.type_name}" if stored else "not in the file"
                continue
            copy.place(layer, self._record(file, stored, layer))
            types[stored.type_name] += 1
        if not types:
            found = ", ".join(sorted(set(reasons.values())))
            raise UnsupportedModelError(
                f"gguf: {file.path} stores no layer as blocks of a type that is known here ({found}); "
                f"known are {', '.join(BLOCK_FORMATS)}"
            )
        facts = {"file": str(file.path), "types": dict(sorted(types.items()))}
        return copy.finish(self.describe(), facts, reasons=reasons)

    @property
    def _named_path(self) -> Path:
        return Path(self.file).expanduser()

    def _path_for(self, model: nn.Module) -> Path:
        path = self._named_path if self.file else source_of(model)
        if path is None:
            raise UnsupportedModelError(
                "gguf: this model was not loaded from a .gguf file by name; say which file its weights are from, "
                "as in gguf:file=PATH"
            )
        return path

    def _record(self, file: GgufFile, stored: Stored, layer: Layer) -> QuantizedWeight:
        if stored.shape != layer.weight.shape:
            raise _mismatch(file, stored, layer, f"shape {list(layer.weight.shape)}, stored {list(stored.shape)}")
        record = record_of(file.rows_of(stored, layer), stored.type_name, self.activations)
        if (apart := _difference(record.dequantize(), layer.weight)) is not None:
            raise _mismatch(file, stored, layer, f"values differ by up to {apart:.2g}")
        return record


def _difference(stored: Tensor, weight: Tensor) -> float | None:
    """How far apart two matrices are, ``None`` where it is no more than rounding.

    That is 1e-6 of the largest value for float32 arithmetic, and half a unit of the last place of a 16-bit ``weight``.
    """
    full = weight.float()
    allowed = torch.finfo(weight.dtype).eps / 2 * full.abs() + 1e-6 * full.abs().max()
    apart = (stored - full).abs()
    return None if bool((apart <= allowed).all()) else float(apart.max())


def _mismatch(file: GgufFile, stored: Stored, layer: Layer, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"gguf: layer {layer.name} is not what {file.path} stores as {stored.name} ({stored.type_name}): {what}. Was "
        "the model changed, or loaded from another file? Load it from this one, name the right one with file=, or "
        f"leave the layer out with exclude={layer.name}"
    )
