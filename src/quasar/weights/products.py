"""Floating-point products whose rows have the same bits at any width, and that are fast at few rows.

A library's product of floats picks its way by the shape, and with it the order of its sums. For one shape there is
one way, and a row of the result depends neither on its place nor on the other rows. So rows are padded with zeros to
panels of a fixed size. That this holds is tried, not assumed: see
:meth:`quasar.verifiers.causal_lm.CausalLMVerifier.strict`.

On a CPU the panel is also the faster way. Written ``W @ x.T``, a product for 4 rows reads the weight once at the speed
of memory; ``x @ W.T``, which a linear layer computes, takes 2.7 times as long for one row, 4 times for four and 3
times for six (MKL, float32; ``bench_a_product_of_few_rows`` in ``benchmarks/bench_parts.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WEIGHT_FIRST_ROWS = 4
_LIBRARY_ROWS = 16


def is_faster_in_panels(weight: Tensor) -> bool:
    """Whether the product with the weight first is the faster one: for float32 on a CPU, where MKL computes it."""
    on_mkl = weight.device.type == "cpu" and torch.backends.mkl.is_available()
    return on_mkl and weight.dtype == torch.float32


def product_in_panels(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``[..., in]`` inputs and an ``[out, in]`` weight to ``[..., out]``, in fixed panels of rows.

    The result is contiguous at any width: what follows it sums in an order that depends on the layout.
    """
    weight_first = is_faster_in_panels(weight)
    n = _WEIGHT_FIRST_ROWS if weight_first else _LIBRARY_ROWS
    rows = inputs.reshape(-1, inputs.shape[-1])
    padded = nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % n))
    panels = [(weight @ panel.T).T if weight_first else panel @ weight.T for panel in torch.split(padded, n)]
    outputs = panels[0] if len(panels) == 1 else torch.cat(panels)
    outputs = outputs[: rows.shape[0]].contiguous().view(*inputs.shape[:-1], -1)
    return outputs if bias is None else outputs + bias
