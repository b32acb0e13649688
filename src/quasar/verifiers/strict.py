"""Matrix products whose rows have the same bits at any width: always computed for the same number of rows.

A library's product of floats picks its way by the shape, and with it the order of its sums. For one shape there is
one way, and a row of the result does not depend on its place nor on the other rows. So rows are padded with zeros to
blocks of a fixed size; the price is that one row costs as much as a block. That it holds is tried, not assumed: see
:meth:`quasar.verifiers.causal_lm.CausalLMVerifier.strict`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quasar.quantizers.layers import linear_layers, replace_module
from quasar.verifiers.attention import is_attending_by_rows

BLOCK = 16
"""Rows of a block."""


class FixedBlocks(nn.Module):
    """A linear layer that runs on blocks of :data:`BLOCK` rows while a draft is verified."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        if not is_attending_by_rows():
            outputs: Tensor = self.linear(inputs)  # a prompt is computed once and in one piece, whatever is drafted
            return outputs
        rows = inputs.flatten(0, -2)
        padded = nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % BLOCK))
        blocks = torch.cat([self.linear(block) for block in torch.split(padded, BLOCK)])
        return blocks[: rows.shape[0]].unflatten(0, inputs.shape[:-1])  # type: ignore[no-untyped-call, no-any-return]


def use_fixed_blocks(model: nn.Module) -> None:
    """Replace every floating-point linear layer of ``model``, which shares its tensors with nobody's modules."""
    for layer in list(linear_layers(model)):
        replace_module(model, layer.name, FixedBlocks(layer.module))
