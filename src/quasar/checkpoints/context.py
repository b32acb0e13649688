"""How long a sequence a model takes at most, as its files declare it, read before anything is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

_KEY = ".context_length"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a GGUF value by the number of its type; strings are 8, arrays 9."""

_STRING, _ARRAY = 8, 9
_INTEGERS = {0: "<B", 2: "<H", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}


def declared_context(path: str, file: str | None = None) -> int | None:
    """An upper bound of the positions that a model has; ``None`` where nothing on this machine says so.

    Args:
        path: Folder, or a Hub id, of which only what is downloaded already is looked at.
        file: Name of a ``.gguf`` file in the folder, if that is the model.
    """
    try:
        if file is not None:
            with Path(path, file).open("rb") as opened:
                return _of_gguf(opened)
        config = Path(path, "config.json")
        found = config if config.is_file() else _downloaded(path)
        return None if found is None else _of_config(json.loads(found.read_text(encoding="utf-8-sig")))
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        struct.error,
    ):  # whoever loads the model will say what is wrong
        return None


def _downloaded(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json")
    return Path(found) if isinstance(found, str) else None


def _of_config(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings")
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = scaling.get("factor") or 1.0  # which may be counted in already: it is a bound that is wanted
    return int(positions * max(1.0, factor)) if isinstance(positions, int) else None


def _of_gguf(file: BinaryIO) -> int | None:
    """Metadata come first in such a file, and a model's dimensions before its tokens."""
    magic, _, _, n_values = struct.unpack("<4sIQQ", file.read(24))
    for _ in range(n_values if magic == b"GGUF" else 0):
        key = file.read(_number(file, "<Q")).decode()
        kind = _number(file, "<I")
        if key.endswith(_KEY) and kind in _INTEGERS:
            return _number(file, _INTEGERS[kind])
        _skip(file, kind)
    return None


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, "<Q"), 1)
    elif kind == _ARRAY:
        inner, n = _number(file, "<I"), _number(file, "<Q")
        if inner in _SIZES:
            file.seek(n * _SIZES[inner], 1)
        else:
            for _ in range(n):
                _skip(file, inner)
    else:
        file.seek(_SIZES[kind], 1)


def _number(file: BinaryIO, form: str) -> int:
    (value,) = struct.unpack(form, file.read(struct.calcsize(form)))
    return int(value)
