"""Load a model that was quantized and saved: Quasar's own, and whatever a plug-in reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from quasar.checkpoints.files import CONFIG, TensorFiles, read_json
from quasar.checkpoints.own import OwnFormat
from quasar.errors import CheckpointError
from quasar.kernels import KernelChooser
from quasar.progress import track
from quasar.protocols import CheckpointFormat
from quasar.registry.registry import default_registry
from quasar.weights.layers import Layer, Places, is_linear_type, replace_module, untie_quantized_head
from quasar.weights.linear import QuantizedLinear, quantized_layers
from quasar.weights.provenance import note_quantization
from quasar.weights.shifted_norm import ShiftedNorm

_OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where tools wrote what stands in ``config.json`` now."""

_READERS = {"gptq": "quasar-gptq", "awq": "quasar-awq", "compressed-tensors": "quasar-compressed-tensors"}
"""Packages to install, by what they read."""

_COMPUTED = (".inv_freq", ".masked_bias")
"""Buffers that older versions of transformers stored and newer ones compute."""


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint; ``None`` for a model in full precision.

    Raises:
        CheckpointError: A file that is no JSON object.
    """
    found = read_json(folder / CONFIG).get("quantization_config")
    if found is not None:
        return found if isinstance(found, dict) else {"quant_method": found}
    for name, method in _OLD_FILES.items():
        if (folder / name).is_file():
            return {"quant_method": method, **read_json(folder / name)}
    return None


def why_unreadable(quantization: Mapping[str, Any]) -> str | None:
    """Why nothing that is installed reads such a checkpoint, and what would do; ``None`` where something does."""
    method = quantization.get("quant_method")
    methods = [entry.name for entry in default_registry().entries("checkpoint")]
    if method in methods:
        return None
    package = f" ({_READERS[method]})" if method in _READERS else ""
    return (
        f"it is quantized by {method!r}, and the plug-ins that are loaded read {', '.join(methods)}; install one that "
        f"reads it{package}, or give the full model"
    )


@torch.no_grad()
def load_quantized(
    folder: Path, quantization: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    """Build the model, with a :class:`QuantizedLinear` in the place of each layer that is stored quantized.

    Args:
        dtype: Precision of what is stored in full; ``None``: as the checkpoint says.

    Raises:
        CheckpointError: Files that are damaged; tensors that are missing, too many, or of another shape.
        InvalidRequestError: The format does not know how a layer is stored.
    """
    form: CheckpointFormat = default_registry().build("checkpoint", quantization["quant_method"], dict(quantization))
    own = form if isinstance(form, OwnFormat) else None
    stored = TensorFiles(folder)
    if own is not None:
        own.check(stored)
    model = _empty_model(folder, dtype, None if own is None else own.attention)
    if own is not None:
        _wrap_norms(model, own.shifted_norms)
    read = _place_layers(model, form, stored, device)
    untie_quantized_head(model)
    full = {name: stored[name] for name in stored if name not in read}
    if own is not None:
        full |= {name: full[source] for name, source in own.shared.items()}
    else:
        ignored = _ignored_names(model)
        full = {name: tensor for name, tensor in full.items() if not name.endswith(_COMPUTED) and not ignored(name)}
    _fill(model, full, None if own is not None and dtype is None else model.dtype)
    if own is not None and (lost := sorted(own.layers.keys() - quantized_layers(model).keys())):
        raise CheckpointError(f"the model has no linear layer {lost[0]}, which the checkpoint describes")
    note_quantization(model, quantization.get("quantizer") or {"quantizer": quantization["quant_method"]})
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    placed: nn.Module = model
    placed.to(device).eval()
    return model


def _empty_model(folder: Path, dtype: torch.dtype | None, attention: str | None) -> PreTrainedModel:
    """Memory that nothing has written to: what is replaced or assigned later never takes any."""
    try:
        config = AutoConfig.from_pretrained(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the model in memory is Quasar's business, not transformers'
        with no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype or config.dtype, attn_implementation=attention
            )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes no causal LM: {error}") from error
    return model


def _ignored_names(model: nn.Module) -> Callable[[str], bool]:
    """Which names transformers leaves out on purpose where it loads such a model, or a part of it."""
    # Of the classes: the objects have those of their parts too, where they would be taken for names of the whole.
    patterns = [
        (f"{place}." if place else "", re.compile(pattern))
        for place, part in model.named_modules()
        for pattern in getattr(type(part), "_keys_to_ignore_on_load_unexpected", None) or ()
    ]

    def ignored(name: str) -> bool:
        return any(name.startswith(place) and pattern.search(name[len(place) :]) for place, pattern in patterns)

    return ignored


def _wrap_norms(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Give norms that have none the bias that ``w8a8:smooth=shift`` gave them."""
    for name in names:
        norm = model.get_submodule(name)
        replace_module(model, name, ShiftedNorm(norm, torch.empty_like(norm.weight)))  # type: ignore[arg-type]


def _place_layers(
    model: PreTrainedModel, form: CheckpointFormat, stored: Mapping[str, Tensor], device: torch.device
) -> set[str]:
    """Give each record to a kernel; returns the names of the tensors that went into it."""
    kernels = KernelChooser(str(getattr(form, "kernel", "auto")))
    places, read = Places(model), set[str]()
    names = _by_module(stored)
    # By type alone: whether a layer computes a product cannot be tried on memory that nothing has written to.
    linear = [Layer(name, module) for name, module in model.named_modules() if is_linear_type(module)]
    for layer in track([layer for layer in linear if layer.name in names], "loading"):
        parts = {part: stored[f"{layer.name}.{part}"] for part in names[layer.name]}
        if (record := form.read(layer.name, parts)) is None:
            continue
        if record.shape != tuple(layer.weight.shape):
            raise CheckpointError(
                f"layer {layer.name} is stored as {list(record.shape)}, the model has {list(layer.weight.shape)}"
            )
        record = record.to(device)
        kernel_name, kernel = kernels.choose(record)
        bias = _bias_of(layer, parts, device)
        places.replace(layer.name, QuantizedLinear(kernel.prepare(record), bias, kernel_name))
        read |= {f"{layer.name}.{part}" for part in parts}
    return read


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    modules = defaultdict(list)
    for name in names:
        module, _, part = name.rpartition(".")
        modules[module].append(part)
    return dict(modules)


def _bias_of(layer: Layer, parts: Mapping[str, Tensor], device: torch.device) -> Tensor | None:
    bias = parts.get("bias")
    if layer.bias is not None and bias is None:
        raise CheckpointError(f"{layer.name}.bias is missing from the checkpoint")
    if bias is not None and (not bias.is_floating_point() or bias.shape != layer.weight.shape[:1]):
        raise CheckpointError(f"{layer.name}.bias is stored as {bias.dtype} {list(bias.shape)}")
    if bias is None or (layer.bias is None and not bias.any()):
        return None  # some tools write zeros for every layer
    return bias.to(device, layer.weight.dtype)


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
    """Assign what is stored in full, floating tensors in ``dtype`` (``None``: as they are), and tie what is tied."""
    buffers = dict(model.named_buffers())
    expected = {**model.state_dict(), **buffers}
    if foreign := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(f"the model has no {foreign[0]}, which the checkpoint stores ({len(foreign)} such names)")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.is_floating_point() != expected[name].is_floating_point():
            raise CheckpointError(
                f"{name} is stored as {tensor.dtype} {list(tensor.shape)}, the model has {expected[name].dtype} "
                f"{list(expected[name].shape)}"
            )
    # Buffers keep their precision: transformers computes them in float32 whatever the dtype of the model.
    chosen = {name: tensor if name in buffers else _cast(tensor, dtype) for name, tensor in tensors.items()}
    model.load_state_dict(chosen, strict=False, assign=True)
    for name in chosen.keys() - model.state_dict().keys():  # a buffer that a model computes, and that was saved
        owner, _, buffer = name.rpartition(".")
        model.get_submodule(owner).register_buffer(buffer, chosen[name], persistent=False)
    model.requires_grad_(False)
    _untie_stored_head(model, chosen)
    model.tie_weights()
    _check_complete(model, chosen)


def _untie_stored_head(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> None:
    """A head that is stored and is not the embedding stays what it is, whatever the configuration says of it."""
    modules = (model.get_output_embeddings(), model.get_input_embeddings())
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    head, embedding = (stored.get(names.get(id(module), "")) for module in modules)
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        model.config.tie_word_embeddings = False
        model.config.get_text_config().tie_word_embeddings = False


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _check_complete(model: nn.Module, chosen: Mapping[str, Tensor]) -> None:
    """Nothing is left unwritten: each name was stored, or is tied to one that was."""
    state = model.state_dict(keep_vars=True)
    written = {id(state[name]) for name in chosen.keys() & state.keys()} | {
        id(layer.bias) for layer in quantized_layers(model).values()
    }
    if missing := sorted(name for name, tensor in state.items() if id(tensor) not in written):
        raise CheckpointError(f"{missing[0]} is missing from the checkpoint ({len(missing)} such names)")
