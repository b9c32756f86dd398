"""Reads the header of a GGUF file without the values of its long arrays, and needs no torch."""

from __future__ import annotations

import struct
from typing import Any

import gguf
import numpy as np

_LONGEST_ARRAY = 1024
"""Elements of an array that is read."""


class GgufHeader(gguf.GGUFReader):
    """Reads a file without the values of its long arrays: those of a vocabulary, read one by one, take seconds.

    Raises `OSError`, `ValueError`, `KeyError`, `IndexError` or `struct.error` for a file that cannot be read, and
    `ValueError` for one that ends before the last of its tensors.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it names {end} bytes and has {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        order = "<" if self.endianess == gguf.GGUFEndian.LITTLE else ">"
        kind, count = struct.unpack_from(f"{order}IQ", self.data.data, orig_offs)
        end = orig_offs + struct.calcsize(f"{order}IQ")
        scalar = self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind))
        if count <= _LONGEST_ARRAY or kind == gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        if scalar is not None:
            end += count * np.dtype(scalar).itemsize
        else:
            length, data = struct.Struct(f"{order}Q"), self.data.data
            for _ in range(count):
                end += length.size + length.unpack_from(data, end)[0]
        return end - orig_offs, [], [], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
