"""Writes and reads tensors in the format of safetensors while other threads of the process run.

The library copies or writes all tensors in one call that keeps the interpreter (`serialize` and `serialize_file` in
its `bindings/python/src/lib.rs`), so a large file would stop everything else that a server does. It maps what it reads:
a file that somebody shortens in place would end each process that computes with its tensors (SIGBUS).
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of data types."""
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER_ALIGNMENT = 8


def in_bfloat16(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters as files have them: in bfloat16, each in a piece of the host's memory."""
    return {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}


def write_tensors(file: IO[bytes], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors by name, each from its own memory. Raises `OSError`, and `ValueError` for a type without a name."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    # Larger numbers come first, so that all are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    end = 0
    for name, value in ordered:
        if value.dtype not in _NAMES:
            raise ValueError(f"tensor {name!r}: {value.dtype} has no name in safetensors")
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, value in ordered:
        file.write(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def read_tensors(file: Path, header: Mapping[str, Any], first: int, names: Collection[str]) -> dict[str, Tensor]:
    """Read the tensors with these names into memory of their own. A name that the file does not have is left out.

    `header` says what the file has of each tensor, and `first` is the number of bytes before the first one's. Raises
    `OSError`, and `ValueError`, `KeyError` or `TypeError` for a broken file.
    """
    found: dict[str, Tensor] = {}
    with file.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size - first
        for name in header.keys() & set(names):
            entry = header[name]
            dtype, shape, (begin, end) = _TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not 0 <= begin <= end <= size or min(shape, default=0) < 0:
                raise ValueError(f"{name} is beyond the end of the file")
            if prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"{name} takes {end - begin} bytes, not those of {entry['dtype']} {shape}")
            value = found[name] = torch.empty(shape, dtype=dtype)
            stream.seek(first + begin)
            rest = value.view(-1).view(torch.uint8).numpy().data
            while rest:
                count = stream.readinto(rest)
                if not count:
                    raise ValueError(f"{name} is beyond the end of the file")
                rest = rest[count:]
    return found
