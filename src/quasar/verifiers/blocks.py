"""Floating-point products whose rows have the same bits at any width, and that are fast at few rows.

A library's product of floats picks its way by the shape, and with it the order of its sums. For one shape there is
one way, and a row of the result depends neither on its place nor on the other rows. So rows are padded with zeros to
blocks of a fixed size. That this holds is tried, not assumed: see
:meth:`quasar.verifiers.causal_lm.CausalLMVerifier.strict`.

On a CPU the block is also the faster way. Written ``W @ x.T``, a product for 4 rows reads the weight once at the speed
of memory; ``x @ W.T``, which a linear layer computes, takes 2.5 times as long for one row and 4 times for six
(MKL, float32; ``benchmarks/bench_parts.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quasar.quantizers.layers import Layer, linear_layers, replace_module
from quasar.verifiers.attention import is_attending_by_rows

_WEIGHT_FIRST_ROWS = 4
_LIBRARY_ROWS = 16


class FixedBlocks(nn.Module):
    """A linear layer that runs on blocks of as many rows while a draft is verified, and as ever on a prompt."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer = layer
        self.weight, self.bias = layer.module.weight, layer.module.bias
        self._weight_first = runs_faster_in_blocks(layer)
        self._rows = _WEIGHT_FIRST_ROWS if self._weight_first else _LIBRARY_ROWS

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if not is_attending_by_rows():
            # A prompt is computed once and in one piece, whatever is drafted.
            return self._layer.module(inputs)  # type: ignore[no-any-return]
        rows = inputs.reshape(-1, inputs.shape[-1])
        padded = nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % self._rows))
        blocks = [self._product(block) for block in torch.split(padded, self._rows)]
        outputs = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        # Contiguous at any width: what follows sums in an order that depends on the layout.
        return outputs[: rows.shape[0]].contiguous().view(*inputs.shape[:-1], -1)

    def _product(self, rows: Tensor) -> Tensor:
        """``[n, in]`` to ``[n, out]``."""
        weight, bias = self._layer.weight, self._layer.bias
        if not self._weight_first:
            return nn.functional.linear(rows, weight, bias)
        outputs = (weight @ rows.T).T
        return outputs if bias is None else outputs + bias


def runs_faster_in_blocks(layer: Layer) -> bool:
    """Whether the product with the weight first is the faster one: for float32 on a CPU, where MKL computes it."""
    on_mkl = layer.weight.device.type == "cpu" and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return on_mkl and layer.weight.dtype == torch.float32


def use_fixed_blocks(model: nn.Module, *, only_where_faster: bool = False) -> None:
    """Replace the floating-point linear layers of ``model``, which shares its tensors with nobody's modules."""
    for layer in list(linear_layers(model)):
        if runs_faster_in_blocks(layer) or not only_where_faster:
            replace_module(model, layer.name, FixedBlocks(layer))
