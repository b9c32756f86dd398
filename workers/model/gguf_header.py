"""Reads the headers of GGUF files, the values of their long arrays when they are asked for, and needs no torch.

A model may be divided into several files, as `llama-gguf-split` does: `name-00001-of-00003.gguf` and so on. The first
has the keys, and each has tensors of its own.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np

_LONGEST_ARRAY = 1024
"""Elements of an array that is read at once."""
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name, number and count of a part."""
_DIVIDED = "split."
"""Begins the keys that say which part of a divided model a file is."""


class PartsError(ValueError):
    """Parts of a divided model do not belong together."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """What the files of a model have together."""

    fields: Mapping[str, gguf.ReaderField]
    """The keys, by name."""
    tensors: Sequence[gguf.ReaderTensor]
    """All tensors. Their data are mapped from the file that has them."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """The texts of an array in a mapped file."""

    data: memoryview
    first: int
    """Byte of the first text's length."""
    count: int
    length: struct.Struct

    def spans(self) -> Iterator[tuple[int, int]]:
        """First byte of each text, and the byte after its last."""
        end = self.first
        for _ in range(self.count):
            start = end + self.length.size
            end = start + self.length.unpack_from(self.data, end)[0]
            yield start, end


class _LongField(gguf.ReaderField):
    """A field with a long array of texts, which are read when they are asked for."""

    def contents(self, index_or_slice: int | slice = slice(None)) -> Any:
        texts = cast("_Texts", self.parts[-1])
        return [str(texts.data[start:end], "utf-8") for start, end in texts.spans()][index_or_slice]


class GgufHeader(gguf.GGUFReader):
    """Reads a file without an object for each value of its long arrays: those of a vocabulary take seconds and 1 GB.

    Raises `OSError`, `ValueError`, `KeyError`, `IndexError` or `struct.error` for a file that cannot be read, and
    `ValueError` for one that ends before the last of its tensors.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it names {end} bytes and has {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> int:
        end: int = super()._build_fields(offs, count)
        for name, field in self.fields.items():
            if isinstance(field.parts[-1], _Texts):
                self.fields[name] = _LongField(*field)
        return end

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
        self.keys_end = int(offs)  # the byte after the last key
        return super()._build_tensor_info(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        order = "<" if self.endianess == gguf.GGUFEndian.LITTLE else ">"
        kind, count = struct.unpack_from(f"{order}IQ", self.data.data, orig_offs)
        end = orig_offs + struct.calcsize(f"{order}IQ")
        scalar = self.gguf_scalar_to_np.get(gguf.GGUFValueType(kind))
        if count <= _LONGEST_ARRAY or kind == gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(kind)]
        if scalar is not None:
            values = self._get(end, scalar, count)
            return end + values.nbytes - orig_offs, [values], [0], types
        texts = _Texts(self.data.data, end, count, struct.Struct(f"{order}Q"))
        for _, end in texts.spans():  # noqa: B007 - the last one's
            pass
        return end - orig_offs, [texts], [0], types


def parts_of(file: Path) -> tuple[Path, ...]:
    """The files of a model in order: all parts of a divided one, of which `file` is any, else `file` alone."""
    named = _PART.fullmatch(file.name)
    if named is None:
        return (file,)
    numbers = range(1, int(named[3]) + 1)
    return tuple(file.with_name(f"{named[1]}-{number:05}-of-{named[3]}.gguf") for number in numbers) or (file,)


def model_stem(file: Path) -> str:
    """The name of a model's file without `.gguf`, and without the number of a part."""
    named = _PART.fullmatch(file.name)
    return file.stem if named is None else named[1]


def read_gguf(file: Path) -> GgufModel:
    """What a model's files have together; `file` is one of them.

    Raises as `GgufHeader` does, and `PartsError` for parts that do not belong together.
    """
    return _together(_readers(file))


def join_parts(file: Path, joined: Path) -> None:
    """Write the parts of a divided model to one file, with the bytes of all tensors. Raises as `read_gguf` does."""
    readers = _readers(file)
    first, tensors = readers[0], _together(readers).tensors
    order = "<" if first.endianess == gguf.GGUFEndian.LITTLE else ">"
    starts = [*(field.offset for field in first.fields.values()), first.keys_end]
    spans = zip(first.fields, starts, starts[1:], strict=False)
    keys = [first.data[start:end].data for name, start, end in spans if not name.startswith(("GGUF.", _DIVIDED))]
    with joined.open("wb") as stream:
        stream.write(first.data[:8].data)  # the format and its version
        stream.write(struct.pack(f"{order}QQ", len(tensors), len(keys)))
        stream.writelines(keys)
        offset = 0
        for tensor in tensors:
            stream.writelines(part.tobytes() for part in tensor.field.parts[:-1])
            stream.write(struct.pack(f"{order}Q", offset))
            offset += tensor.n_bytes + -tensor.n_bytes % first.alignment
        for tensor in tensors:
            stream.write(bytes(-stream.tell() % first.alignment))
            stream.write(tensor.data.data)


def _readers(file: Path) -> list[GgufHeader]:
    """A reader of each of a model's files. Raises `PartsError` for a part with another's name."""
    parts, readers = parts_of(file), list[GgufHeader]()
    for number, part in enumerate(parts, 1):
        reader = GgufHeader(part)
        found = int(_value(reader, "no", 0)) + 1, max(1, int(_value(reader, "count", 1)))
        if found != (number, len(parts)):
            raise PartsError(
                f"{part.name} is part {found[0]} of {found[1]}; its name must end with "
                f"-{found[0]:05}-of-{found[1]:05}.gguf, and the other parts must be beside it"
            )
        readers.append(reader)
    return readers


def _together(readers: Sequence[GgufHeader]) -> GgufModel:
    """What files have together. Raises `PartsError` for a tensor that two have, and for too few tensors."""
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    names = Counter(tensor.name for tensor in tensors)
    if repeated := next((name for name, count in names.items() if count > 1), None):
        raise PartsError(f"two parts have the tensor {repeated!r}")
    if (wanted := int(_value(readers[0], "tensors.count", len(tensors)))) != len(tensors):
        raise PartsError(f"{len(readers)} parts have {len(tensors)} tensors together; they must have {wanted}")
    return GgufModel(readers[0].fields, tensors)


def _value(reader: GgufHeader, key: str, default: int) -> Any:
    field = reader.fields.get(_DIVIDED + key)
    return default if field is None else field.contents()
