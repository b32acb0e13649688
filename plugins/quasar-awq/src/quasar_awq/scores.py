"""Which linear layers make the scores of attention (queries and keys): observed, not looked up by name.

Their outputs are multiplied with each other and go through a softmax, so the error of one of them alone says little
of the error that it causes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from quasar.weights.layers import Layer

_NEW_LAYER = {"linear", "addmm"}
"""Products with a weight: what made their input is not what made their output."""


class _Follower(TorchFunctionMode):
    """Follows the outputs of layers through torch functions until the next layer."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._origins = WeakTensorKeyDictionary()

    def produced(self, name: str, output: object) -> None:
        """The layer ``name`` made ``output``, whatever went into it."""
        self._mark(output, frozenset({name}))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, arguments = getattr(func, "__name__", ""), [*args, *(kwargs or {}).values()]
        if name == "scaled_dot_product_attention":
            self.found |= self._origins_of(arguments[:2])  # query and key; not the value
        elif name == "softmax":
            self.found |= self._origins_of(arguments)
        elif name not in _NEW_LAYER and (origins := self._origins_of(arguments)):
            self._mark(result, origins)
        return result

    def _mark(self, result: object, origins: frozenset[str]) -> None:
        for tensor in _tensors(result):
            self._origins[tensor] = origins

    def _origins_of(self, arguments: object) -> frozenset[str]:
        return frozenset().union(*(self._origins.get(tensor, ()) for tensor in _tensors(arguments)))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


@torch.no_grad()
def score_layers(model: nn.Module, layers: Sequence[Layer], token_ids: Tensor) -> set[str]:
    """Run the model once; returns the names of the layers whose output enters a softmax before it enters a layer.

    Where attention runs in a kernel of its own that torch functions do not show, none is found.

    Args:
        layers: All linear layers of the model.
        token_ids: ``[1, T]``.
    """
    follower = _Follower()
    hooks = [
        layer.module.register_forward_hook(lambda _m, _i, output, name=layer.name: follower.produced(name, output))
        for layer in layers
    ]
    try:
        with follower:
            model(input_ids=token_ids, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return follower.found
