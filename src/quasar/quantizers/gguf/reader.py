"""Reads the metadata of a ``.gguf`` file once, and fast, for transformers and for us.

The package gguf makes several arrays of numpy out of every token of the vocabulary, and transformers has a file read by
it three times: for the configuration, the tokenizer and the weights.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf import dequantize as _dequantize_rows

from quasar.errors import InvalidRequestError

_LONG = 1000
"""Elements from which an array of metadata is that of a vocabulary."""

_PIECE = 2**17
"""Bytes of blocks that are mapped back at once: few enough for a cache, and enough for numpy."""

_ROWS_AT_ONCE = 16
"""What the package gguf maps back at once."""


class FastReader(GGUFReader):
    """What ``GGUFReader`` is, without the subclass of numpy arrays and the parts that nobody asks for.

    Of an array of strings, ``parts`` are its type, its length and the strings, without a length before each.
    """

    @property
    def data(self) -> Any:
        """The file, mapped into memory."""
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = mapped.view(np.ndarray)  # a slice of a memmap takes five times as long

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        inner = int(self._get(orig_offs, np.uint32)[0])
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        first = orig_offs + 12
        if inner == GGUFValueType.STRING:
            elements, end = _strings(self.data, first, length)
        elif inner in self.gguf_scalar_to_np:
            numbers = self._get(first, self.gguf_scalar_to_np[GGUFValueType(inner)], length)
            elements, end = list(numbers.reshape(-1, 1)), first + int(numbers.nbytes)
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        types = [GGUFValueType.ARRAY, GGUFValueType(inner)] if length else [GGUFValueType.ARRAY]
        return end - orig_offs, head + elements, list(range(2, 2 + length)), types


def _strings(data: Any, first: int, length: int) -> tuple[list[Any], int]:
    """The bytes of each of so many strings, and where the last one ends."""
    content, place, found = memoryview(data), first, []
    read_length = struct.Struct("<Q").unpack_from
    for _ in range(length):
        (size,) = read_length(content, place)
        place += 8 + size
        if place > len(content):
            raise ValueError("a string goes beyond the end of the file")
        found.append(data[place - size : place])
    return found, place


def mapped(path: str) -> Any:
    """The bytes of a file, mapped into memory, as an array whose slices are made quickly."""
    return np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)


def dequantize(data: Any, kind: GGMLQuantizationType) -> Any:
    """As the package's own function, bit for bit: blocks know nothing of rows, so several are one long row to it."""
    if data.ndim != 2 or data.dtype != np.uint8:
        return _dequantize_rows(data, kind)
    joined = 1
    while len(data) % (2 * joined) == 0 and 2 * joined * _ROWS_AT_ONCE * data.shape[1] <= _PIECE:
        joined *= 2
    return _dequantize_rows(data.reshape(len(data) // joined, -1), kind).reshape(len(data), -1)


class WithoutVocabulary:
    """The same file without its vocabulary: of arrays of that length, only how long they are."""

    def __init__(self, reader: FastReader) -> None:
        self.tensors = reader.tensors
        self.lengths = {name: len(field.data) for name, field in reader.fields.items() if len(field.data) > _LONG}
        self.fields = {
            name: field._replace(data=[]) if name in self.lengths else field for name, field in reader.fields.items()
        }

    def value(self, key: str) -> Any:
        """What a key says: a string, a number, a truth value or a list of such; ``None`` where it is not there."""
        field = self.fields.get(key)
        return None if field is None else field.contents()


def open_gguf(path: Path) -> WithoutVocabulary:
    """The file, its metadata read and its tensors mapped.

    Raises:
        InvalidRequestError: There is no such file, or it is no GGUF file.
    """
    if not path.is_file():
        raise InvalidRequestError(f"gguf: there is no file {path}")
    try:
        return WithoutVocabulary(FastReader(path))
    except Exception as error:  # the reader checks little: a file of something else fails anywhere in it
        raise InvalidRequestError(f"gguf: {path} cannot be read as a GGUF file: {error}") from error
