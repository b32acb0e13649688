"""Quasar's own format: the fields of :class:`QuantizedWeight` by name, and a description in JSON.

A folder as transformers writes it (``config.json``, ``model.safetensors``, the tokenizer). The description is the
``quantization_config`` in ``config.json``: version of the format, what quantized the model with its options, and bits,
activations and checksums layer by layer. Values of few bits are packed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quasar.checkpoints.packing import pack, unpack
from quasar.errors import CheckpointError
from quasar.weights.record import QuantizedWeight

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


def description_checksum(description: Mapping[str, Any]) -> int:
    """CRC-32 of a description, but for the checksum itself."""
    content = {key: value for key, value in description.items() if key != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


class OwnFormat:
    """Reads what :mod:`quasar.checkpoints.saving` wrote.

    Args:
        config: The description.

    Raises:
        CheckpointError: It is of another version, or is not what was written.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        version = config.get("version")
        if version != VERSION or isinstance(version, bool):
            raise CheckpointError(
                f"the model was saved in version {version!r} of the format, this Quasar reads version {VERSION}"
            )
        if config.get("checksum") != description_checksum(config):
            raise CheckpointError(
                "the description of the quantized model (quantization_config in config.json) is damaged or was edited: "
                "its checksum is not the one that it states"
            )
        self.kernel: str = config["kernel"]
        self.attention: str | None = config["attention"]
        self.shared: Mapping[str, str] = config["shared"]
        self.shifted_norms: Sequence[str] = config["shifted_norms"]
        self.layers: Mapping[str, Any] = config["layers"]
        self._checksums: Mapping[str, int] = config["checksums"]

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise :class:`CheckpointError` naming the first tensor that is missing, too many, or has changed."""
        if foreign := sorted(tensors.keys() - self._checksums.keys()):
            raise CheckpointError(f"{foreign[0]} is stored, but not in the description ({len(foreign)} such names)")
        for name, expected in self._checksums.items():
            if name not in tensors:
                raise CheckpointError(f"{name} is missing from the checkpoint")
            if checksum(tensors[name]) != expected:
                raise CheckpointError(f"{name} is damaged: its checksum is not the one in the description")

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight | None:
        """See :class:`quasar.protocols.CheckpointFormat`."""
        if (layer := self.layers.get(name)) is None:
            return None
        try:
            parts = {part: tensor for part, tensor in tensors.items() if part != "bias"}
            packing = {key: layer[key] for key in ("packed", "lowest", "columns")}
            values = unpack(parts.pop("values"), **packing)
            return QuantizedWeight(values, bits=layer["bits"], activations=layer["activations"], **parts)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"layer {name} is not stored as its description says: {error}") from error
