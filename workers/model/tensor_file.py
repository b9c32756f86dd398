"""Writes tensors in the format of safetensors while other threads of the process run.

The library copies or writes all tensors in one call that keeps the interpreter (`serialize` and `serialize_file` in
its `bindings/python/src/lib.rs`), so a large file would stop everything else that a server does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of data types."""
_HEADER_ALIGNMENT = 8


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
