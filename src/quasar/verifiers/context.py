"""How long a sequence a model takes, and up to where what it says of a position depends on its past alone.

Some rotary embeddings choose their frequencies by the largest position of the call (longrope, dynamic NTK). A draft
that reaches over such a switch would change rows before it, so models are tried for one, up to their longest sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quasar.errors import InvalidRequestError

_PROBED = (1, 2, 3)
_UNBOUNDED = 2**17
"""Positions up to which a model is tried that declares no longest sequence."""


def declared_length(config: Any) -> int | None:
    """Positions of a model by its configuration, those included that scaling of its rotary embedding adds.

    YaRN states the length that was trained, so a longest sequence that counts the factor already is known. Linear
    scaling states none, and then multiplies what the configuration has, unless layers of several kinds have rotary
    embeddings of their own: those configurations (Gemma 3) count it already.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:  # XLNet says -1: as many as you like
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    nested = any(isinstance(value, Mapping) for value in rope.values())
    return positions if nested else max(positions, _extended(rope, positions))


def _extended(rope: Mapping[str, Any], positions: int) -> int:
    factor, trained = rope.get("factor") or 1.0, rope.get("original_max_position_embeddings") or positions
    return int(trained * factor) if rope.get("rope_type") in ("yarn", "linear") else 0


def chosen_length(model: PreTrainedModel, asked: int | None) -> int | None:
    """The longest sequence of a model: what was asked for, else what the configuration declares.

    Raises:
        InvalidRequestError: More was asked for than the table of positions of a model without rotary embedding has.
    """
    declared = declared_length(model.config.get_text_config())
    if asked is None or declared is None:
        return asked or declared
    if asked > declared and next(rotary_embeddings(model), None) is None:
        raise InvalidRequestError(
            f"max_length={asked}: {type(model).__name__} has {declared} positions; give at most as many"
        )
    return asked


def rotary_embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that make cosines and sines of positions, by name."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            yield name, module


def steady_length(rotary: nn.Module, longest: int | None) -> int | None:
    """Length of the longest sequence in which no position changes the embedding of another; ``None`` if any.

    Args:
        rotary: One of :func:`rotary_embeddings`. It is left as it is.
        longest: Positions that the model has.
    """
    known, changed = max(_PROBED) + 1, longest or _UNBOUNDED
    if changed <= known or _keeps_rows(rotary, changed):
        return None
    while changed - known > 1:
        middle = (known + changed) // 2
        known, changed = (middle, changed) if _keeps_rows(rotary, middle) else (known, middle)
    return known


def _keeps_rows(rotary: nn.Module, length: int) -> bool:
    """Whether the first positions are embedded as ever beside the last one of a sequence of this ``length``."""
    rope_type = getattr(rotary, "rope_type", None)
    kinds: Iterable[str | None] = rope_type if isinstance(rope_type, dict) else (None,)
    for kind in kinds:
        alone, beside = (_embedded(rotary, positions, kind) for positions in (_PROBED, (*_PROBED, length - 1)))
        if not all(torch.equal(one, other[:, : len(_PROBED)]) for one, other in zip(alone, beside, strict=True)):
            return False
    return True


@torch.no_grad()
def _embedded(rotary: nn.Module, positions: tuple[int, ...], kind: str | None) -> tuple[Tensor, ...]:
    own = copy.deepcopy(rotary)  # some note in themselves how long a sequence they have seen
    device = next((tensor.device for tensor in own.buffers()), torch.device("cpu"))
    like = torch.empty((1, 1, 1), dtype=torch.float32, device=device)
    asked = torch.tensor([positions], dtype=torch.int64, device=device)
    try:
        found = own(like, asked) if kind is None else own(like, asked, kind)
    except Exception:  # it is called in another way, and cannot be tried alone
        return ()
    return tuple(part for part in found if part.shape[:2] == asked.shape) if isinstance(found, tuple) else ()


def switch_of(model: PreTrainedModel, longest: int | None) -> tuple[int, str] | None:
    """Where the rotary embedding of a model switches, and the type of it; ``None`` if nowhere."""
    found = [(steady_length(rotary, longest), rotary) for _, rotary in rotary_embeddings(model)]
    switches = [(length, str(getattr(rotary, "rope_type", ""))) for length, rotary in found if length is not None]
    return min(switches, default=None)
