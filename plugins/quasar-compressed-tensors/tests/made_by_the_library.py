"""Checkpoints that compressed-tensors itself makes of tiny models, and what it computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file
from torch import Tensor, nn

from quasar.testing.models import random_prompt, tiny


@attrs.frozen(eq=False)
class Checkpoint:
    """A folder, what lies in it, and the model that the library decompresses it to.

    The model's forward rounds activations as the library does.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    model: Any

    def layer(self, name: str) -> dict[str, Tensor]:
        """What is stored under a name, by the last part of the names."""
        return {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in self.tensors.items()
            if key.rpartition(".")[0] == name
        }

    def linear_layers(self) -> dict[str, nn.Linear]:
        return {name: module for name, module in self.model.named_modules() if isinstance(module, nn.Linear)}


def make_checkpoint(
    folder: Path,
    groups: dict[str, Any],
    *,
    ignore: tuple[str, ...] = ("lm_head",),
    stored: str | None = None,
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Checkpoint:
    """Quantize a tiny model by its own extremes, compress and save it, as llm-compressor does.

    Args:
        groups: ``config_groups``.
        stored: The format, in place of what the library chooses.
        options: For the model's configuration.
    """
    model = tiny(family, dtype=dtype, **options)
    config = QuantizationConfig(config_groups=groups, ignore=list(ignore))
    apply_quantization_config(model, config, show_progress=False)
    _set_scales(model)
    compressor = ModelCompressor.from_pretrained_model(model, stored)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    return Checkpoint(folder, written, load_file(folder / "model.safetensors"), model)


@torch.no_grad()
def _set_scales(model: Any) -> None:
    modules = [module for module in model.modules() if getattr(module, "quantization_scheme", None) is not None]
    hooks = [module.register_forward_pre_hook(_set_input_scale) for module in modules]
    for module in modules:
        module.quantization_enabled = False
        weight, args = module.weight.data, module.quantization_scheme.weights
        module.weight_scale.data, module.weight_zero_point.data = calculate_qparams(*extremes(weight, args), args)
    model(input_ids=torch.tensor([random_prompt(40, seed=9)]))
    for hook in hooks:
        hook.remove()
    for module in modules:
        del module.quantization_enabled


def extremes(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """The least and the largest of what shares a scale."""
    if args.strategy == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    groups = weight.unflatten(1, (-1, args.group_size if args.strategy == "group" else weight.shape[1]))
    return groups.amin(-1), groups.amax(-1)


def _set_input_scale(module: Any, inputs: tuple[Tensor]) -> None:
    args = module.quantization_scheme.input_activations
    if args is not None and not args.dynamic:
        # a little less than the extremes, so that some of the inputs are cut off
        scale, _ = calculate_qparams(0.8 * inputs[0].amin(), 0.8 * inputs[0].amax(), args)
        module.input_scale.data = scale
