"""Write a quantized model to a folder that :func:`quasar.checkpoints.models.load_model` reads. No pickle."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quasar.checkpoints.files import CONFIG, WEIGHTS
from quasar.checkpoints.own import METHOD, VERSION, checksum, description_checksum, stored_layer
from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.weights.linear import quantized_layers
from quasar.weights.shifted_norm import ShiftedNorm


def save_quantized(
    folder: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    description: Mapping[str, Any] | None = None,
) -> None:
    """Save a model that a quantizer made, with its tokenizer.

    The folder appears whole or not at all.

    Args:
        folder: Must not exist, or be empty.
        description: What the quantizer says of itself (``describe()``); JSON-serialisable.

    Raises:
        InvalidRequestError: The folder holds something, or cannot be written.
        UnsupportedModelError: No layer of the model is quantized.
    """
    target = Path(folder).expanduser()
    check_target(target)
    _check_savable(model)
    try:
        own = json.loads(json.dumps(description or {}))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the description is not JSON-serialisable: {error}") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as unfinished:
            _write(Path(unfinished), model, tokenizer, own)
            _move(Path(unfinished), target)
    except OSError as error:
        raise InvalidRequestError(f"{target} cannot be written: {error.strerror or error}") from error


def _check_savable(model: PreTrainedModel) -> None:
    layers = quantized_layers(model)
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no quantized layer; save it with transformers")
    everywhere = [name for name, module in model.named_modules(remove_duplicate=False) if module in layers.values()]
    if twice := sorted(set(everywhere) - layers.keys()):
        raise UnsupportedModelError(f"{twice[0]} is a layer that has another name too; such a model cannot be saved")


def check_target(folder: Path) -> None:
    """Raise where :func:`save_quantized` would refuse the folder."""
    if folder.suffix == ".gguf":
        raise InvalidRequestError(f"{folder} would be taken for a .gguf file; give the folder another name")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InvalidRequestError(f"{folder} exists and is not empty; give a folder that is new")


def _write(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, description: dict[str, Any]
) -> None:
    tensors, shared = _full_tensors(model)
    layers = {}
    for name, module in quantized_layers(model).items():
        stored, layers[name] = stored_layer(module.executor.weight)
        tensors |= {f"{name}.{part}": tensor.cpu().contiguous() for part, tensor in stored.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    config["architectures"] = [type(model).__name__]
    written = {
        "quant_method": METHOD,
        "version": VERSION,
        "versions": _versions(),
        "kernel": description.pop("kernel", "auto"),
        "quantizer": {key: value for key, value in description.items() if key not in ("layers", "kernels")},
        "layers": layers,
        "shared": shared,
        "shifted_norms": [name for name, module in model.named_modules() if isinstance(module, ShiftedNorm)],
        "attention": model.config._attn_implementation,
        "checksums": {name: checksum(tensor) for name, tensor in tensors.items()},
    }
    config["quantization_config"] = {**written, "checksum": description_checksum(written)}
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors gives nobody else a right to read
    if model.generation_config is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")  # as it is: not validated
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _full_tensors(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What is not quantized, each tensor once, and the other names of those that have several.

    Buffers that a model computes are among them if they are floating: ``model.to(dtype)`` rounds them.
    """
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    for name, tensor in (model.state_dict() | buffers).items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and (first := seen.setdefault(identity, name)) != name:
            shared[name] = first
        else:
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors, shared


def _versions() -> dict[str, str]:
    from quasar import __version__

    return {"quasar": __version__, "torch": str(torch.__version__), "transformers": transformers.__version__}


def _move(unfinished: Path, target: Path) -> None:
    """All files or none. An empty folder stays the one that it was: it may be a mount, or belong to somebody else."""
    target.mkdir(exist_ok=True)
    moved: list[Path] = []
    try:
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == CONFIG):
            moved.append(target / path.name)
            shutil.move(str(path), moved[-1])
    except OSError:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
