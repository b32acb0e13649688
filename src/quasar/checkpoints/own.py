"""Quasar's own format: the fields of :class:`QuantizedWeight` by name, and a description in JSON.

A folder as transformers writes it (``config.json``, ``model.safetensors``, the tokenizer). The description is the
``quantization_config`` in ``config.json``: version of the format, what quantized the model with its options, and bits,
activations and checksums layer by layer. Values of few bits are packed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.packing import pack, unpack
from quasar.errors import CheckpointError
from quasar.quantizers.weight import QuantizedWeight

METHOD = "quasar"
VERSION = 1


def stored_layer(record: QuantizedWeight) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of one layer, and what its description says beside them."""
    values, packing = pack(record.values)
    tensors = {**record.tensors(), "values": values}
    return tensors, {"bits": record.bits, "activations": record.activations, **packing}


def checksum(tensor: Tensor) -> int:
    """CRC-32 of the bytes."""
    contents: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(contents) if tensor.numel() else 0


class OwnFormat:
    """Reads what :mod:`quasar.checkpoints.saving` wrote.

    Args:
        config: The description.

    Raises:
        CheckpointError: It is of another version, or has no layers.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        if (version := config.get("version")) != VERSION:
            raise CheckpointError(
                f"the model was saved in version {version!r} of the format, this Quasar reads version {VERSION}"
            )
        if not isinstance(config.get("layers"), Mapping):
            raise CheckpointError("the description of the quantized model (config.json) lists no layers")
        self.kernel = config.get("kernel", "auto")
        self.shared: Mapping[str, str] = config.get("shared", {})
        self.shifted_norms: Sequence[str] = config.get("shifted_norms", ())
        self._layers = config["layers"]
        self._checksums: Mapping[str, int] = config.get("checksums", {})

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise :class:`CheckpointError` naming the first tensor that is missing or whose bytes have changed."""
        for name, expected in self._checksums.items():
            if name not in tensors:
                raise CheckpointError(f"{name} is missing from the checkpoint")
            if checksum(tensors[name]) != expected:
                raise CheckpointError(f"{name} is damaged: its checksum is not the one in the description")

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight | None:
        """See :class:`quasar.protocols.CheckpointFormat`."""
        if (layer := self._layers.get(name)) is None:
            return None
        try:
            parts = {part: tensor for part, tensor in tensors.items() if part != "bias"}
            packing = {key: layer[key] for key in ("packed", "lowest", "columns")}
            values = unpack(parts.pop("values"), **packing)
            return QuantizedWeight(values, bits=layer["bits"], activations=layer["activations"], **parts)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"layer {name} is not stored as its description says: {error}") from error
