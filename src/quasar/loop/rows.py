"""Rows of logits where tokens are chosen from them: as numpy arrays, on one thread.

torch would wake its threads for a whole vocabulary, and they spin for a while afterwards, in the way of the threads of
a compiled verifier, whose next step then takes up to twice as long. numpy wakes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasar.errors import NumericalError


class NoTokenError(NumericalError):
    """The largest value of a row of logits is NaN or infinite, so that no token can be chosen from it."""

    def __init__(self, largest: float) -> None:
        super().__init__(f"no token can be chosen from logits whose largest value is {largest}")
        self.largest = largest


Rows = Tensor | Sequence[Tensor]
"""``[n, V]`` logits, or n rows ``[V]`` that are made when they are asked for."""


class HostRows:
    """Rows of logits by number, each an array; those of a device come in one transfer, when the first is asked for."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._arrays: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> NDArray[Any]:
        if not isinstance(self._rows, Tensor):
            return as_array(self._rows[number])
        if self._arrays is None:
            self._arrays = _stored(self._rows)
        return _widened(self._arrays[number], self._rows.dtype)


def as_array(row: Tensor) -> NDArray[Any]:
    """A ``[V]`` row in float64 if that is its dtype, and otherwise in float32, with the same values; maybe a view."""
    return _widened(_stored(row), row.dtype)


def _stored(rows: Tensor) -> NDArray[Any]:
    """The memory of rows of any shape, on the host; bfloat16, which numpy lacks, as integers of 16 bits."""
    rows = rows.detach().cpu()
    array: NDArray[Any] = (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array


def _widened(stored: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    if dtype == torch.bfloat16:  # the upper half of a float32
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored if stored.dtype == np.float64 else stored.astype(np.float32, copy=False)


def best_place(row: NDArray[Any]) -> int:
    """Where the first of the largest of ``[V]`` logits stands.

    Raises:
        NoTokenError: It is NaN or infinite.
    """
    place = int(row.argmax())  # the first NaN, if there is one
    if not -np.inf < row[place] < np.inf:
        raise NoTokenError(float(row[place]))
    return place


def is_choosable(row: NDArray[Any]) -> bool:
    """Whether a token can be chosen from ``[V]`` logits: the largest is neither NaN nor infinite."""
    return bool(-np.inf < row.max() < np.inf)


def best_places(rows: Tensor) -> list[int]:
    """:func:`best_place` of each row of ``[n, V]`` logits on a device, in one transfer; -1 where it raises."""
    values, places = rows.detach().max(dim=-1)
    found: list[int] = torch.where(values.isfinite(), places, -1).tolist()
    return found
