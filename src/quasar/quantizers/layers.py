"""Which layers of a model can be quantized, and a copy of the model to do it in."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quasar.errors import NumericalError


@attrs.frozen(eq=False)
class Layer:
    """A linear layer of a model: ``nn.Linear``, or ``Conv1D`` (GPT-2), whose weight is stored transposed."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """``[out, in]``; a view of the layer's parameter."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.T if isinstance(self.module, Conv1D) else weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias  # type: ignore[return-value]


@attrs.frozen
class Skipped:
    """A weight matrix that stays as it is, and why."""

    name: str
    reason: str


def structure_copy(model: nn.Module) -> Any:
    """A copy of all modules that shares every tensor with ``model``: replace tensors in it, never write to them."""
    memo = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, memo)


def linear_layers(model: nn.Module) -> Iterator[Layer]:
    """All linear layers, in the order of the modules."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield Layer(name, module)


def skipped_weights(model: nn.Module, quantized: set[str]) -> list[Skipped]:
    """Every matrix of the model that is not the weight of a layer in ``quantized``."""
    reasons = {nn.Linear: "linear layer left alone", Conv1D: "linear layer left alone", nn.Embedding: "embedding"}
    skipped = []
    for name, module in model.named_modules():
        if name in quantized:
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            kind = next((reason for cls, reason in reasons.items() if isinstance(module, cls)), None)
            reason = kind or f"a {parameter.dim()}-D parameter of {type(module).__name__}, not a linear layer"
            skipped.append(Skipped(f"{name}.{parameter_name}", reason))
    return skipped


def replace_module(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Put ``replacement`` where the module called ``name`` is, under every name that it has."""
    replaced = model.get_submodule(name)
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is replaced]
    for parent, _, child in (name.rpartition(".") for name in names):
        setattr(model.get_submodule(parent), child, replacement)


def check_finite(layer: Layer) -> None:
    """Raise :class:`NumericalError` naming the tensor where a weight or bias is NaN or infinite."""
    for name, tensor in (("weight", layer.weight), ("bias", layer.bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise NumericalError(f"{layer.name}.{name} has {bad} non-finite values; it cannot be quantized")
