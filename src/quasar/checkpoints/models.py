"""Where a model comes from: a Hub id, a local folder, a ``.gguf`` file, or the demo model ``smollm2``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from quasar.checkpoints.gguf import load_gguf
from quasar.checkpoints.hub import how_to_reach, is_on_the_hub
from quasar.checkpoints.loading import load_quantized, quantization_of, why_unreadable
from quasar.checkpoints.own import METHOD
from quasar.checkpoints.places import locate
from quasar.errors import CheckpointError, InvalidRequestError, ModelNotFoundError, QuasarError, UnsupportedModelError
from quasar.timings import timed
from quasar.weights.provenance import note_source

_TOKENIZER_FILES = (
    "*token*",
    "*vocab*",
    "*.model",
    "*.tiktoken",
    "tekken*",
    "merges.txt",
    "*sentencepiece*",
    "*spm*",
    "*bpe*",
)
"""How files are called from which some class of transformers makes a tokenizer."""


@attrs.frozen(eq=False)
class LoadedModel:
    """A causal LM in evaluation mode, and its tokenizer."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


@timed("load")
def load_model(
    name: str, *, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name: Hub id, folder, path of a ``.gguf`` file, or ``smollm2``. A folder may come without a tokenizer. What it
            holds may be quantized: by Quasar, or in a format that a plug-in reads.
        dtype: As a torch dtype or its name; ``None``: float32 on a CPU, where 16 bits are slow and inexact, and the
            checkpoint's own elsewhere. A model that Quasar saved keeps its own everywhere.
        device: ``None``: CUDA where it is available, else the CPU.

    Raises:
        ModelNotFoundError: Nothing is found under that name.
        InvalidRequestError: ``dtype`` or ``device`` is not one.
        CheckpointError: A quantized model whose files are damaged or incomplete.
        UnsupportedModelError: transformers knows no causal LM of its kind.
    """
    place = _as_device(device)
    arguments = locate(name)
    if is_on_the_hub(arguments):
        arguments |= how_to_reach(name)
    number = _as_dtype(dtype, place)
    quantization = _quantization_of(arguments)
    try:
        if "gguf_file" in arguments:
            file = Path(arguments["pretrained_model_name_or_path"], arguments["gguf_file"])
            model, tokenizer, missing = load_gguf(file, number)
            note_source(model, file)
        else:
            tokenizer = AutoTokenizer.from_pretrained(**arguments) if _has_tokenizer(arguments) else None
            if quantization is not None:
                return LoadedModel(name, _load_quantized(name, quantization, dtype, place), tokenizer)
            loading: Any = AutoModelForCausalLM.from_pretrained(**arguments, dtype=number, output_loading_info=True)
            model, missing = loading[0], sorted(loading[1]["missing_keys"])
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if isinstance(error, QuasarError):
            raise
        if other := re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error)):
            raise UnsupportedModelError(
                f"model {name!r} has the configuration {other[1]}, for which transformers has no causal LM; give a "
                "decoder-only language model (…ForCausalLM)"
            ) from error
        raise ModelNotFoundError(f"model {name!r} cannot be loaded: {_first_line(error)}") from error
    if missing:  # transformers makes them up, with a warning
        raise CheckpointError(f"model {name!r} lacks {missing[0]} ({len(missing)} such names)")
    return LoadedModel(name, model.to(place).eval(), tokenizer)


def _quantization_of(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """How a checkpoint is quantized; ``None`` for one that is not, or that cannot be reached."""
    if "gguf_file" in arguments:
        return None
    folder = Path(arguments["pretrained_model_name_or_path"])
    if folder.is_dir():
        return quantization_of(folder)
    try:
        return getattr(AutoConfig.from_pretrained(**arguments), "quantization_config", None)
    except (OSError, ValueError):  # loading the model will say so
        return None


def _load_quantized(
    name: str, quantization: Mapping[str, Any], dtype: str | torch.dtype | None, place: torch.device
) -> PreTrainedModel:
    """Through a format that is installed, and not by transformers, which would hide that the model is quantized."""
    if reason := why_unreadable(quantization):
        raise ModelNotFoundError(f"model {name!r} cannot be loaded: {reason}")
    number = _as_dtype(dtype, place)
    keeps_its_own = dtype is None and quantization["quant_method"] == METHOD
    stored = number if isinstance(number, torch.dtype) and not keeps_its_own else None
    try:
        return load_quantized(_folder_of(name), quantization, stored, place)
    except QuasarError:
        raise
    except Exception as error:  # whatever a file may hold that nobody thought of
        raise CheckpointError(f"model {name!r} is not what it says: {type(error).__name__}: {error}") from error


def _folder_of(name: str) -> Path:
    """The folder itself, or the Hub's files in the local cache."""
    path = Path(name).expanduser()
    return (
        path
        if path.is_dir()
        else Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **how_to_reach(name)))
    )


def check_loadable(name: str, dtype: str | torch.dtype | None = None) -> None:
    """Raise what :func:`load_model` would, as far as it shows without loading; whether a Hub id exists does not."""
    _as_dtype(dtype, torch.device("cpu"))
    locate(name)


def _has_tokenizer(arguments: Mapping[str, Any]) -> bool:
    """A folder may hold a model alone, for token ids in and out; anything else comes with a tokenizer."""
    folder = Path(arguments["pretrained_model_name_or_path"])
    if "gguf_file" in arguments or not folder.is_dir():
        return True
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _as_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequestError(f"device={device!r} cannot be used: {_first_line(error)}") from error
    return place


def _as_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else "auto"
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidRequestError(f"dtype={dtype!r} is not a floating-point dtype; use float32, bfloat16 or float16")
    return found


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
