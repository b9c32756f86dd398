"""The memory that weights take as they are stored, for every plan of memory and for the figures of benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch

from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.quantized_checkpoint import FORMATS, QuantizedCheckpoint, quantization_of
from workers.model.stored.source import stored_file

_TABLES = ("token_embd.weight", "embed_tokens.weight", "wte.weight")
_HEADS = ("output.weight", "lm_head.weight")


def stored_bytes(directory: Path, dtype: str, *, read_by_a_step: bool = False) -> int | None:
    """Bytes of a model's weights in memory with `quantization: stored`; `None` for one that has no such weights.

    Plain tensors are kept as `dtype`. With `read_by_a_step`, an embedding that is not the head, too, is left out,
    because a step reads a few of its rows only. Raises `ModelLoadError`.
    """
    plain: torch.dtype = getattr(torch, dtype)
    settings = quantization_of(directory)
    if settings is not None:
        if settings.get("quant_method") not in FORMATS:
            return None
        sizes = QuantizedCheckpoint(directory, plain).sizes()
    elif (file := stored_file(directory)) is not None:
        sizes = GgufFile(file, plain).sizes()
    else:
        return None
    has_head = any(name in _HEADS for name in sizes)
    left_out = _TABLES if read_by_a_step and has_head else ()
    return sum(size for name, size in sizes.items() if not name.endswith(left_out))
