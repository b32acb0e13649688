"""One layer after another of a checkpoint, by its ``quantization_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.weights.record import QuantizedWeight
from quasar_compressed_tensors.record import FLOATS, record_of
from quasar_compressed_tensors.schemes import Schemes


class CompressedTensorsCheckpoint:
    """Reads the layers of one checkpoint.

    Args:
        config: The checkpoint's ``quantization_config``.

    Raises:
        InvalidRequestError: The configuration is broken, or says something that Quasar has no way to compute; the
            message names the config group.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._schemes = Schemes(config)

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight | None:
        """The record of one layer; ``None``: it is stored in full.

        Args:
            name: Of the layer, as the configuration's targets speak of it.
            tensors: All that the checkpoint stores under that name, by the last part of the names.

        Raises:
            InvalidRequestError: A tensor is missing, or its shape, dtype or values do not fit; the message names the
                layer.
            NumericalError: A scale is not finite.
        """
        scheme = self._schemes.of(name)
        if scheme is not None and tensors.keys() - {"bias"}:
            return record_of(name, scheme, tensors)
        if "weight_packed" in tensors or ("weight" in tensors and tensors["weight"].dtype not in FLOATS):
            raise InvalidRequestError(
                f"compressed-tensors: layer {name} is stored quantized, but no config group of the checkpoint says "
                "how: none targets it, or its list 'ignore' names it; correct quantization_config in config.json"
            )
        return None
