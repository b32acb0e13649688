"""What a quantizer rounded, kept beside what it made: the same copy of the model without any rounding.

A quantizer that moves scales between layers changes weights before it rounds them. To tell the two apart,
:class:`quasar.quantizers.assembly.QuantizedCopy` hands each weight to :func:`keep` as it is just before the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from quasar.weights.layers import replace_module, structure_copy


class UnroundedLinear(nn.Module):
    """A linear layer whose weight may be in a higher precision than its inputs.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``; kept in the dtype it has.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, same dtype."""
        outputs = (inputs.to(torch.float32) @ self.weight.to(torch.float32).T).to(inputs.dtype)
        return outputs if self.bias is None else outputs + self.bias


_kept: ContextVar[dict[str, UnroundedLinear] | None] = ContextVar("quasar_unrounded", default=None)


@contextmanager
def keeping_unrounded() -> Iterator[dict[str, UnroundedLinear]]:
    """Inside the ``with`` statement, what is rounded is kept in the dictionary, by the names of the layers."""
    kept: dict[str, UnroundedLinear] = {}
    token = _kept.set(kept)
    try:
        yield kept
    finally:
        _kept.reset(token)


def keep(name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Keep an ``[out, in]`` weight that is about to be rounded, where somebody asked for it."""
    if (kept := _kept.get()) is not None:
        kept[name] = UnroundedLinear(weight, bias)


def unrounded_twin(quantized: nn.Module, kept: Mapping[str, UnroundedLinear]) -> Any:
    """A copy of the quantized model with the layers that were kept in their places; it shares all tensors."""
    twin = structure_copy(quantized)
    for name, linear in kept.items():
        replace_module(twin, name, linear)
    return twin
