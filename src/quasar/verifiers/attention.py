"""Attention whose result for a position does not depend on how many positions are computed with it.

Kernels for one query and for several differ in their last bits, and int8 activations turn a last bit into a whole
rounding step now and then. So while a draft is verified, each query row is computed by itself over exactly its own
keys, by the attention function that the model uses anyway: the same call, hence the same bits, as decoding one token
a step. The row's keys end where the row stands, which is also what makes the causal mask bottom-right aligned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

_by_rows: ContextVar[bool] = ContextVar("quasar_attention_by_rows", default=False)


@contextmanager
def attending_by_rows() -> Iterator[None]:
    """Inside, models prepared by :func:`use_row_attention` compute each query row by itself."""
    token = _by_rows.set(True)
    try:
        yield
    finally:
        _by_rows.reset(token)


def is_attending_by_rows() -> bool:
    """Whether a draft is being verified."""
    return _by_rows.get()


def use_row_attention(model: PreTrainedModel) -> bool:
    """Make ``model`` able to attend by rows; ``False``, and nothing is changed, if its attention is not replaceable."""
    implementation = model.config._attn_implementation
    if implementation not in _WRAPPED or not model._can_set_attn_implementation():
        return False
    model.set_attn_implementation(_WRAPPED[implementation])
    return True


def _attend(
    attend: Callable[..., tuple[Tensor, Any]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """``query`` ``[B, H, t, D]`` over ``key`` and ``value`` ``[B, H, T, D]``; returns ``[B, t, H, D]``."""
    if not _by_rows.get():
        return attend(module, query, key, value, attention_mask, **options)
    width, length = query.shape[2], key.shape[2]
    rows = []
    for row in range(width):
        visible = length - (width - 1 - row)
        mask = None if attention_mask is None else attention_mask[:, :, row : row + 1, :visible]
        row_query, row_key, row_value = query[:, :, row : row + 1], key[:, :, :visible], value[:, :, :visible]
        rows.append(attend(module, row_query, row_key, row_value, mask, **options)[0])
    return (rows[0] if width == 1 else torch.cat(rows, dim=1)), None


def _attend_sdpa(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Any]:
    return _attend(sdpa_attention_forward, module, *tensors, **options)


def _attend_eager(module: nn.Module, *tensors: Any, **options: Any) -> tuple[Tensor, Any]:
    # Every architecture brings an eager attention of its own (soft-caps, sinks), beside its attention module.
    return _attend(sys.modules[type(module).__module__].eager_attention_forward, module, *tensors, **options)


def _mask(make_mask: Callable[..., Tensor | None], *arguments: Any, **options: Any) -> Tensor | None:
    if _by_rows.get():
        if options.get("mask_function") is causal_mask_function and options.get("attention_mask") is None:
            return None  # a row sees all keys up to its own
        # With the mask left out where it happens to hide nothing, one width would take another path than the next.
        options["allow_is_causal_skip"] = False
    return make_mask(*arguments, **options)


def _mask_sdpa(*arguments: Any, **options: Any) -> Tensor | None:
    return _mask(sdpa_mask, *arguments, **options)


def _mask_eager(*arguments: Any, **options: Any) -> Tensor | None:
    return _mask(eager_mask, *arguments, **options)


_WRAPPED = {"sdpa": "quasar_sdpa", "eager": "quasar_eager"}

AttentionInterface.register("quasar_sdpa", _attend_sdpa)
AttentionInterface.register("quasar_eager", _attend_eager)
AttentionMaskInterface.register("quasar_sdpa", _mask_sdpa)
AttentionMaskInterface.register("quasar_eager", _mask_eager)
