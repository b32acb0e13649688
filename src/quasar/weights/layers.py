"""Which layers of a model can be quantized, and a copy of the model to do it in."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import InvalidRequestError, NumericalError, UnsupportedModelError
from quasar.weights.linear import QuantizedLinear, quantized_layers
from quasar.weights.record import ROWS_AT_ONCE, QuantizedWeight


@attrs.frozen(eq=False)
class Layer:
    """A linear layer of a model: ``nn.Linear``, or ``Conv1D`` (GPT-2), whose weight is stored transposed."""

    name: str
    module: nn.Module

    @property
    def weight(self) -> Tensor:
        """``[out, in]``; a view of the layer's parameter."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.T if is_transposed(self.module) else weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias  # type: ignore[return-value]


@attrs.frozen
class LayerReport:
    """What became of one layer.

    Args:
        name: Name of the module.
        shape: ``(out, in)``.
        bits: Bits of a weight.
        nbytes: Bytes of integers, scales and zero points together; a kernel may hold more.
        kernel: What executes it.
        error: Size of the change of the weight as a share of its own (Frobenius norms), after smoothing; ``None``
            where the full weight is not known.
        smoothed: Whether a part of the activations' spread was moved into it.
    """

    name: str
    shape: tuple[int, int]
    bits: int
    nbytes: int
    kernel: str
    error: float | None
    smoothed: bool = False

    @classmethod
    def of(
        cls, name: str, weight: Tensor, record: QuantizedWeight, kernel: str, *, smoothed: bool = False
    ) -> LayerReport:
        """Compare an ``[out, in]`` weight with the record that was made of it."""
        changed = size = 0.0
        for first in range(0, record.shape[0], ROWS_AT_ONCE):
            rows = weight[first : first + ROWS_AT_ONCE].float()
            changed += float(record.rows(first, first + ROWS_AT_ONCE).dequantize().sub_(rows).norm()) ** 2
            size += float(rows.norm()) ** 2
        error = (changed / max(size, 1e-60)) ** 0.5
        return cls(name, record.shape, record.bits, record.nbytes, kernel, error, smoothed)


@attrs.frozen
class Skipped:
    """A weight matrix that stays as it is, and why."""

    name: str
    reason: str


def choose_layers(model: nn.Module, who: str, *, lm_head: bool, include: str = "", exclude: str = "") -> list[Layer]:
    """The linear layers that a quantizer is to quantize, in the order of the modules.

    Args:
        who: The quantizer, for messages.
        lm_head: Whether the output head is one of them.
        include: Patterns of names, with ``|`` between them; none: all.
        exclude: Patterns of names to leave out.

    Raises:
        UnsupportedModelError: The model is quantized already, or nothing of it is left to quantize.
        InvalidRequestError: A pattern that no layer matches.
        NumericalError: A weight or bias of a chosen layer is not finite.
    """
    check_loaded(model)
    if quantized_layers(model):
        raise UnsupportedModelError(f"{type(model).__name__} is quantized already; give the full model")
    head = model.get_output_embeddings()  # type: ignore[operator]
    layers = [layer for layer in linear_layers(model) if lm_head or layer.module is not head]
    wanted, unwanted = _patterns(include), _patterns(exclude)
    for pattern in (*wanted, *unwanted):
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            examples = ", ".join(layer.name for layer in layers[:3])
            raise InvalidRequestError(f"{who}: no layer matches {pattern!r}; layers are named {examples}, …")
    chosen = [
        layer for layer in layers if (not wanted or _matches(layer.name, wanted)) and not _matches(layer.name, unwanted)
    ]
    if not chosen:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layer that {who} could quantize")
    for layer in chosen:
        check_finite(layer)
    return chosen


def untie_quantized_head(model: nn.Module) -> None:
    """Say that an output head that is quantized has a weight of its own, so that nothing ties it again."""
    if isinstance(model.get_output_embeddings(), QuantizedLinear):  # type: ignore[operator]
        model.config.tie_word_embeddings = False  # type: ignore[union-attr]


def _patterns(text: str) -> list[str]:
    return [pattern.strip() for pattern in text.split("|") if pattern.strip()]


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_loaded(model: nn.Module) -> None:
    """Raise :class:`InvalidRequestError` naming a tensor that has a shape and no values."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise InvalidRequestError(
                f"{name} of {type(model).__name__} has no values (it is on the device 'meta'); load the weights first"
            )


def structure_copy(model: nn.Module) -> Any:
    """A copy of all modules that shares every tensor with ``model``: replace tensors in it, never write to them."""
    executors = (module.executor for module in model.modules() if isinstance(module, QuantizedLinear))
    memo = {id(shared): shared for shared in itertools.chain(model.parameters(), model.buffers(), executors)}
    return copy.deepcopy(model, memo)


def linear_layers(model: nn.Module) -> Iterator[Layer]:
    """All linear layers, in the order of the modules."""
    for name, module in model.named_modules():
        if _is_linear(module):
            yield Layer(name, module)


def _is_linear(module: nn.Module) -> bool:
    if not is_linear_type(module):
        return False
    plain = next(kind for kind in (nn.Linear, _conv1d()) if isinstance(module, kind))
    return type(module).forward is plain.forward or _computes_the_product(module)


def is_linear_type(module: nn.Module) -> bool:
    """By type alone: a subclass may compute something else than a product."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer stores its weight as ``[in, out]``."""
    return isinstance(module, _conv1d())


def _conv1d() -> Any:
    from transformers.pytorch_utils import Conv1D  # takes long to import; whoever has a model has done so

    return Conv1D


@torch.no_grad()
def _computes_the_product(module: nn.Module) -> bool:
    """Try a subclass with a forward of its own: Falcon's is a linear layer, Llama 4's router returns more."""
    layer = Layer("", module)
    probe = torch.randn(
        (2, layer.weight.shape[1]), dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0)
    ).to(layer.weight)
    expected, output = nn.functional.linear(probe, layer.weight, layer.bias), module(probe)
    same_kind = isinstance(output, Tensor) and output.shape == expected.shape
    return same_kind and torch.allclose(output, expected, rtol=1e-2, atol=1e-2)


def skipped_weights(model: nn.Module, quantized: set[str], reasons: Mapping[str, str]) -> list[Skipped]:
    """Every matrix of the model that is not the weight of a layer in ``quantized``.

    Args:
        reasons: Why a layer was left alone, by its name, where a quantizer knows better than this module.
    """
    skipped = []
    for name, module in model.named_modules():
        if name in quantized:
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            reason = reasons.get(name) or _reason_to_skip(module, parameter)
            skipped.append(Skipped(f"{name}.{parameter_name}", reason))
    return skipped


def _reason_to_skip(module: nn.Module, parameter: Tensor) -> str:
    if _is_linear(module):
        return "linear layer left alone"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return f"a {parameter.dim()}-D parameter of {type(module).__name__}, not a linear layer"


class Places:
    """Where the modules of a model stand, looked up once for many replacements.

    Args:
        model: Its modules are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._look_up()

    def replace(self, name: str, replacement: nn.Module) -> None:
        """Put ``replacement`` where the module called ``name`` is, under every name that it has."""
        replaced = self._model.get_submodule(name)
        if replaced not in self._names:  # somebody else put it there
            self._look_up()
        names = self._names.pop(replaced)
        for parent, _, child in (name.rpartition(".") for name in names):
            setattr(self._model.get_submodule(parent), child, replacement)
        self._names[replacement] = names

    def _look_up(self) -> None:
        self._names: defaultdict[nn.Module, list[str]] = defaultdict(list)
        for name, module in self._model.named_modules(remove_duplicate=False):
            self._names[module].append(name)


def replace_module(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Put ``replacement`` where the module called ``name`` is, under every name that it has."""
    Places(model).replace(name, replacement)


def check_finite(layer: Layer) -> None:
    """Raise :class:`NumericalError` naming the tensor where a weight or bias is NaN or infinite."""
    # A sum is quick, and finite only where everything is; it may also be infinite where nothing is.
    for name, tensor in (("weight", layer.weight), ("bias", layer.bias)):
        if tensor is not None and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise NumericalError(f"{layer.name}.{name} has {bad} non-finite values; it cannot be quantized")
