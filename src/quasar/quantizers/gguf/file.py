"""A ``.gguf`` file, asked by the layers of the transformers model that was loaded from it.

The package gguf reads the file; transformers says by which name a weight is stored, and which rows it moves when it
loads one (llama.cpp pairs the rows of queries and keys otherwise). Both are asked, not repeated here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils

from quasar.errors import UnsupportedModelError
from quasar.weights.layers import Layer, is_transposed

_loading: Any = modeling_gguf_pytorch_utils
_DEPTH = 2


@attrs.frozen(eq=False)
class Stored:
    """A weight as the file has it.

    Args:
        name: Name of the tensor in the file.
        type_name: ``"Q4_0"``, ``"F16"``, …
        shape: Shape of the weight that it stands for.
        raw: What is stored, mapped into memory and not read yet; for a type of blocks ``[out, bytes of a row]`` uint8.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    raw: Any


class GgufFile:
    """The tensors of a file, by the layers of a model.

    Args:
        path: Where the file is.
        model: A model of the architecture that is in the file.

    Raises:
        InvalidRequestError: There is no such file, or it is no GGUF file.
        UnsupportedModelError: Nobody knows how the weights of such a model are called in a GGUF file.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        from quasar.quantizers.gguf.reader import open_gguf  # imports the package gguf, which need not be installed

        reader = open_gguf(path)
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._processor = processor_for(reader, model)
        self._weights_map = weights_map(model, self._processor)
        names = {name: stored for stored, name in self._weights_map.items() if stored in self._tensors}
        self._stored_as = {id(weight): names[name] for name, weight in model.named_parameters() if name in names}

    def find(self, layer: Layer) -> Stored | None:
        """What stores the layer's weight, maybe under the name of one that shares it; ``None`` if nothing does."""
        if (name := self._stored_as.get(id(layer.module.weight))) is None:
            return None
        tensor = self._tensors[name]
        return Stored(tensor.name, tensor.tensor_type.name, tuple(tensor.shape.tolist()[::-1]), tensor.data)

    def rows_of(self, stored: Stored, layer: Layer) -> Tensor:
        """``[out, bytes of a row]`` uint8: the layer's rows in the order that they have in the model.

        Raises:
            UnsupportedModelError: transformers does more to this weight than to move rows.
        """
        # Rows are numbered and go the way of the weight: transformers' functions see a matrix of row numbers.
        numbers = np.broadcast_to(np.arange(stored.shape[0], dtype=np.int32)[:, None], stored.shape)
        moved = self._processor.process(
            weights=numbers, name=stored.name, tensor_key_mapping=self._weights_map, parsed_parameters={"tensors": {}}
        ).weights
        rows = torch.from_numpy(np.array(stored.raw)).to(layer.weight.device)
        if moved is numbers:
            return rows
        if is_transposed(layer.module):
            moved = moved.T
        order = moved[:, 0]
        if moved.shape != stored.shape or (moved != order[:, None]).any() or len(set(order.tolist())) < len(order):
            raise UnsupportedModelError(
                f"gguf: transformers changes {stored.name} of {self.path} on its way into {layer.name} by more than an "
                f"order of rows; leave the layer out with exclude={layer.name}"
            )
        return rows[torch.from_numpy(order.astype(np.int64)).to(rows.device)]


def processor_for(reader: Any, model: Any) -> Any:
    """What transformers does to the tensors of this architecture."""
    architecture = next(iter(_loading.read_field(reader, "general.architecture")), None)
    return _loading.TENSOR_PROCESSORS.get(architecture, _loading.TensorProcessor)(config=model.config.to_dict())


def weights_map(model: Any, processor: Any) -> dict[str, str]:
    """Names of parameters in the model, by their names in a file."""
    import gguf

    try:
        with replaced(gguf, get_tensor_name_map=cache(gguf.get_tensor_name_map)):
            found: dict[str, str] = _loading.get_gguf_hf_weights_map(Outline(model), processor)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"gguf: it is not known how the weights of a model of type {model.config.model_type!r} are called in a "
            ".gguf file"
        ) from error
    return found


@contextmanager
def replaced(module: Any, **stand_ins: Any) -> Iterator[None]:
    """Inside the ``with`` statement, whoever asks the module for these names gets the stand-ins."""
    originals = {name: getattr(module, name) for name in stand_ins}
    vars(module).update(stand_ins)
    try:
        yield
    finally:
        vars(module).update(originals)


class Outline:
    """The names of a model and of the modules at its top.

    transformers looks into every module, for prefixes that a file lacks. Those are of a base model, hence near the top.
    """

    def __init__(self, module: Any, depth: int = _DEPTH) -> None:
        self.config = getattr(module, "config", None)
        self._module, self._depth = module, depth

    def state_dict(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self._module.state_dict()
        return state

    def named_children(self) -> list[tuple[str, Outline]]:
        children = self._module.named_children() if self._depth else ()
        return [(name, Outline(child, self._depth - 1)) for name, child in children]
