"""Small integers in fewer bytes: several in one where their range allows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_WIDTHS = (2, 4)


def pack(values: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Pack ``[out, in]`` int8 values along their rows.

    Returns:
        ``[out, ceil(in · packed / 8)]`` uint8, or the values themselves, and how to get back: ``packed`` bits a value
        (8: not packed), the ``lowest`` value, and the number of ``columns``.
    """
    lowest, highest = int(values.min()), int(values.max())
    width = next((width for width in _WIDTHS if highest - lowest < 2**width), 8)
    if width == 8:
        return values, {"packed": 8, "lowest": 0, "columns": values.shape[1]}
    shifted = (values.to(torch.int16) - lowest).to(torch.uint8)
    per_byte = 8 // width
    padded = torch.nn.functional.pad(shifted, (0, -values.shape[1] % per_byte))
    padded = padded.view(len(values), -1, per_byte)
    packed = torch.zeros(padded.shape[:2], dtype=torch.uint8)
    for i in range(per_byte):
        packed |= padded[:, :, i] << (width * i)
    return packed, {"packed": width, "lowest": lowest, "columns": values.shape[1]}


def unpack(stored: Tensor, *, packed: int, lowest: int, columns: int) -> Tensor:
    """``[out, columns]`` int8: what :func:`pack` was given."""
    if packed == 8:
        return stored
    if packed not in _WIDTHS or stored.dtype != torch.uint8:
        raise ValueError(f"{stored.dtype} values with {packed} bits each")
    shifts = range(0, 8, packed)
    values = torch.stack([stored >> shift & (2**packed - 1) for shift in shifts], dim=2).flatten(1)
    if not -(-columns * packed // 8) == stored.shape[1]:
        raise ValueError(f"{columns} columns in rows of {stored.shape[1]} bytes")
    return (values[:, :columns].to(torch.int16) + lowest).to(torch.int8)
