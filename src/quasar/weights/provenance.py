"""Where a model in memory comes from, for as long as it lives: the file of its weights, and what quantized it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_sources: WeakKeyDictionary[nn.Module, Path] = WeakKeyDictionary()
_descriptions: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def note_source(model: nn.Module, file: Path) -> None:
    """Remember the ``.gguf`` file that this very model was loaded from."""
    _sources[model] = file.absolute()


def source_of(model: nn.Module) -> Path | None:
    """The ``.gguf`` file that this very model was loaded from; ``None`` for any other model."""
    return _sources.get(model)


def note_quantization(model: nn.Module, description: Mapping[str, Any]) -> None:
    """Remember what the checkpoint of a model says of how it was quantized."""
    _descriptions[model] = dict(description)


def quantization_described(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint says of how its model was quantized; nothing for a model from elsewhere."""
    return dict(_descriptions.get(model, {}))
