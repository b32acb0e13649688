"""Which linear layers consume what a norm, or another linear layer, produces: observed, not looked up by name.

Two patterns are found in any architecture, because all that is watched is which tensors enter which torch functions.
The linear layers must consume nothing else, for their columns are multiplied for every input:

- norm → linear: every consumer of a norm's output is a linear layer (q/k/v, gate/up);
- linear → linear: a linear layer's output enters one product, ``act(gate) * up``, and every consumer of that is a
  linear layer (up → down).
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from quasar.progress import track
from quasar.quantizers.ranges import Range
from quasar.weights.layers import Layer

_HARMLESS_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "is_cuda", "requires_grad"}
_PRODUCTS = {"mul", "__mul__", "__rmul__"}


@attrs.define(eq=False)
class Group:
    """A producer and the linear layers that consume what it produces.

    Args:
        name: Name of the producer.
        producer: A norm, or a linear layer.
        consumers: By name. Empty: nothing that could be smoothed.
        range: Range of the values that entered the consumers, by channel.
        samples: ``[n, in]`` each: some of the inputs of the consumers, where they were asked for.
        other_consumer: What else consumes it, if anything does; then it cannot be smoothed.
    """

    name: str
    producer: nn.Module
    consumers: dict[str, Layer] = attrs.Factory(dict)
    range: Range | None = None
    samples: list[Tensor] = attrs.Factory(list)
    other_consumer: str | None = None

    @property
    def is_norm(self) -> bool:
        return not isinstance(self.producer, nn.Linear)

    def watch(self, inputs: Tensor, rows: int) -> None:
        """Take in what enters the consumers, ``[..., in]``, and samples of so many rows at even distances."""
        self.range = Range.of(inputs).union(self.range)
        if rows:
            flat = inputs.flatten(0, -2)
            self.samples.append(flat[:: -(-len(flat) // rows)].clone())

    @property
    def peaks(self) -> Tensor | None:
        """``[in]`` float32: the largest absolute value that entered the consumers, by channel."""
        return None if self.range is None else self.range.peaks

    def sampled_inputs(self) -> Tensor:
        """``[n, in]`` float32, the samples of all prompts."""
        return torch.cat(self.samples).float()


class _Tracer(TorchFunctionMode):
    """Follows the outputs of producers from one torch function to the next."""

    def __init__(self, layers: Sequence[Layer], rows: int) -> None:
        super().__init__()
        self._rows = rows
        uses = Counter(id(layer.module.weight) for layer in layers)
        # A weight that several layers share is none that could be multiplied for one of them.
        self._layer_of = {key: layer for layer in layers if uses[key := id(layer.module.weight)] == 1}
        # What each layer consumed; None: something that no group produced.
        self._sources: defaultdict[str, set[Group | None]] = defaultdict(set)
        # Keyed by id, and by weak reference lest an id that is used again be taken for the old tensor.
        self._factors: dict[int, tuple[weakref.ref[Tensor], Group]] = {}
        self._inputs: dict[int, tuple[weakref.ref[Tensor], Group]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every layer has consumed something, so that no other prompt would show more."""
        return self._sources.keys() >= {layer.name for layer in self._layer_of.values()}

    def feeds_only_linear_layers(self, group: Group) -> bool:
        """Whether the group's consumers are linear layers, and these consume nothing else."""
        alone = all(self._sources[name] == {group} for name in group.consumers)
        return bool(group.consumers) and group.other_consumer is None and alone

    def produced(self, output: object, group: Group) -> None:
        """A producer made ``output``: a norm's is the consumers' input, a linear layer's a factor of it."""
        if not isinstance(output, Tensor):
            group.other_consumer = "a structure"
        elif group.is_norm:
            self._watch_input(output, group)
        else:
            self._factors[id(output)] = (weakref.ref(output), group)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        factor_of = None
        if getattr(getattr(func, "__self__", None), "__name__", "") not in _HARMLESS_ATTRIBUTES:
            factor_of = self._note_consumers(func, tuple(_flat((*args, *(kwargs or {}).values()))))
        result = func(*args, **(kwargs or {}))
        if factor_of is not None and result.shape[-1] == factor_of.producer.out_features:
            self._watch_input(result, factor_of)
        elif factor_of is not None:
            factor_of.other_consumer = "a product over other channels"
        return result

    def _note_consumers(self, func: Callable[..., Any], arguments: tuple[Any, ...]) -> Group | None:
        """Note what consumes what; returns the group that ``func`` makes the consumers' input of, if it does."""
        name = getattr(func, "__name__", str(func))
        factor_of = None
        consumer = self._layer_of.get(id(arguments[1])) if func is nn.functional.linear else None
        for argument in arguments:
            if (layer := self._layer_of.get(id(argument))) is not None:
                self._sources[layer.name].add(_find(self._inputs, arguments[0]) if layer is consumer else None)
            elif (group := _find(self._inputs, argument)) is not None:
                if consumer is not None:
                    group.consumers[consumer.name] = consumer
                else:
                    group.other_consumer = name
            elif (group := _find(self._factors, argument)) is not None:
                if name in _PRODUCTS and factor_of is None:
                    factor_of = group
                else:
                    group.other_consumer = name
        return factor_of

    def _watch_input(self, tensor: Tensor, group: Group) -> None:
        group.watch(tensor, self._rows)
        self._inputs[id(tensor)] = (weakref.ref(tensor), group)  # from here on, using it counts as consuming it


def _flat(arguments: Iterable[object]) -> Iterator[object]:
    for argument in arguments:
        if isinstance(argument, list | tuple):  # as of cat and stack
            yield from _flat(argument)
        else:
            yield argument


def _find(watched: dict[int, tuple[weakref.ref[Tensor], Group]], argument: object) -> Group | None:
    reference, group = watched.get(id(argument), (None, None))
    return group if reference is not None and reference() is argument else None


@torch.no_grad()
def trace_groups(
    model: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor], *, rows: int = 0
) -> list[Group]:
    """Run the model on the calibration prompts; returns the groups that can be smoothed.

    Following each tensor takes about as long as the model. So it ends with the prompt after which every layer has been
    seen, which is the first one but for mixtures of experts; of the others, only the inputs of consumers are watched.

    Args:
        model: The full model; not mutated.
        layers: All its linear layers.
        calibration: ``[1, T]`` integer token ids each.
        rows: How many inputs of each prompt to sample for each group, at even distances.
    """
    tracer = _Tracer(layers, rows)
    groups = [Group(name, module) for name, module in model.named_modules() if _is_norm(module)]
    groups += [Group(layer.name, layer.module) for layer in layers if isinstance(layer.module, nn.Linear)]
    prompts = iter(track(calibration, "calibrating"))
    with _hooked(_producing(group, tracer) for group in groups):
        for token_ids in prompts:
            with tracer:
                model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
            if tracer.is_complete:
                break
    found = [group for group in groups if tracer.feeds_only_linear_layers(group)]
    with _hooked(_consuming(group, rows) for group in found):
        for token_ids in prompts:
            model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
    return found


def _producing(group: Group, tracer: _Tracer) -> RemovableHandle:
    return group.producer.register_forward_hook(lambda _module, _inputs, output: tracer.produced(output, group))


def _consuming(group: Group, rows: int) -> RemovableHandle:
    """All consumers get the same input, so one of them is watched."""
    consumer = next(iter(group.consumers.values()))
    return consumer.module.register_forward_pre_hook(lambda _module, inputs: group.watch(inputs[0], rows))


@contextmanager
def _hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    hooks = list(handles)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())
