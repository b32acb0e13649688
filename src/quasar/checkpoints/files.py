"""The files of a saved model: JSON, and tensors in safetensors files, read one at a time. Never a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quasar.errors import CheckpointError

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: There is none in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, expected a JSON object")
    return content


class TensorFiles(Mapping[str, Tensor]):
    """All tensors of a folder by name, in one file or in several with an index; each access reads one.

    Raises:
        CheckpointError: There are no such files, or one is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        index = folder / f"{WEIGHTS}.index.json"
        named = _files_of(index) if index.is_file() else [WEIGHTS]
        self._places: dict[str, tuple[Path, Any]] = {}
        if foreign := [name for name in named if Path(name).name != name]:
            raise CheckpointError(f"{index} names {foreign[0]!r}, which is no file of the folder")
        for path in (folder / name for name in named):
            file = _opened(path)
            self._places |= dict.fromkeys(file.keys(), (path, file))

    def __getitem__(self, name: str) -> Tensor:
        path, file = self._places[name]
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{name} cannot be read from {path}: {error}") from error
        return tensor.clone()  # not a view of the file, which may change, and whose alignment moves last bits

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _files_of(index: Path) -> list[str]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{index} has no weight_map from names to files")
    return sorted(set(places.values()))


def _others_beside(path: Path) -> str:
    """Weights that a folder has under other names, for a message."""
    for pattern, said in (
        ("*.safetensors", "beside it there is {}"),
        ("*.bin", "{} would be a pickle, which is not read"),
    ):
        if names := sorted(file.name for file in path.parent.glob(pattern)):
            return f"; {said.format(', '.join(names[:3]))}"
    return ""


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}{_others_beside(path)}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged, or no safetensors file: {error}") from error
