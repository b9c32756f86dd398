"""The paged attention kernel for CPU: built when first wanted, kept, and done without where it cannot be built."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from workers.model.arrangement import Arrangement, Place
from workers.model.layout import RowShape
from workers.model.loaded import LoadedModel

logger = logging.getLogger(__name__)

_FLAGS = [
    *("-O3", "-march=native", "-fPIC", "-fopenmp"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
]
_BUILD_SECONDS = 60.0
_NAMES = {torch.bfloat16: "pilotfish_attend_bfloat16", torch.float32: "pilotfish_attend_float32"}
_MOST_VECTORS = 64
_MOST_DIM = 256


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "block_size", "most_blocks", "tree_words")),
        *(
            (name, ctypes.c_void_p)
            for name in ("blocks", "slots", "first_token", "stored_len", "base_len", "position", "ancestors")
        ),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "output", "keys", "values")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("query", "key", "value") for axis in ("head", "token")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "table", "window", "sinks")),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class NativeStep:
    """A step's rows as the kernel reads them. Its numbers live as long as it does."""

    header: _Step
    arrays: tuple[npt.NDArray[np.generic], ...]


class Kernel:
    """Attention over one pool's blocks."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._attend = library[_NAMES[dtype]]
        self._attend.argtypes = [ctypes.POINTER(_Step), ctypes.POINTER(_Layer)]
        self._attend.restype = None

    def attend(
        self,
        step: NativeStep,
        place: Place,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, dim]
        value: torch.Tensor,
        pool: tuple[torch.Tensor, torch.Tensor],  # [blocks, block_size, kv_heads, dim]
        scale: float,
    ) -> torch.Tensor:
        """Store the fresh keys and values, then attend. Returns `[1, tokens, heads, dim]`."""
        query, key, value = (_dense(tensor) for tensor in (query, key, value))
        _, heads, tokens, dim = query.shape
        output = torch.empty((1, tokens, heads, dim), dtype=query.dtype)
        layer = _Layer(
            *(tensor.data_ptr() for tensor in (query, key, value, output, *pool)),
            *(stride for tensor in (query, key, value) for stride in tensor.stride()[1:3]),
            heads,
            key.shape[1],
            dim,
            place.table,
            place.sight.window or 0,
            place.sight.sinks,
            scale,
        )
        self._attend(ctypes.byref(step.header), ctypes.byref(layer))
        return output


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """As it is, where the numbers of one head lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def lay_out_natively(rows: Sequence[RowShape], arrangement: Arrangement) -> NativeStep:
    """Tokens of the step are the rows' tokens, one row after another."""
    layout = arrangement.layout
    size, tables = layout.block_size, layout.tables
    most_blocks = max(-(-row.end // size) for row in rows)
    blocks = np.full((tables, len(rows), most_blocks), -1, dtype=np.int32)
    first_token = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([row.width for row in rows], out=first_token[1:])
    tokens = int(first_token[-1])
    slots = np.empty((tables, tokens), dtype=np.int64)
    position = np.empty(tokens, dtype=np.int32)
    words = max(1, *(-(-len(row.tree) // 64) for row in rows)) if rows else 1
    ancestors = np.zeros((tokens, words), dtype=np.uint64)
    for index, row in enumerate(rows):
        first, end = int(first_token[index]), int(first_token[index + 1])
        used = -(-row.end // size)
        stored = np.arange(row.stored_len, row.end)
        for table in range(tables):
            held = np.array(row.blocks[table][:used], dtype=np.int32)
            blocks[table, index, :used] = held
            slots[table, first:end] = held[stored // size].astype(np.int64) * size + stored % size
        if not row.tree:
            position[first:end] = stored
            continue
        position[first:end] = row.positions()
        for node, seen in enumerate(_seen_nodes(row)):
            for word in range(words):
                ancestors[first + row.fresh + node, word] = (seen >> (64 * word)) & 0xFFFF_FFFF_FFFF_FFFF
    stored_len = np.array([row.stored_len for row in rows], dtype=np.int32)
    base_len = np.array([row.base_len for row in rows], dtype=np.int32)
    arrays = (blocks, slots, first_token, stored_len, base_len, position, ancestors)
    header = _Step(len(rows), tokens, size, most_blocks, words, *(array.ctypes.data for array in arrays))
    return NativeStep(header, arrays)


def _seen_nodes(row: RowShape) -> list[int]:
    """For each node, itself and its ancestors as bits."""
    seen: list[int] = []
    for node, parent in enumerate(row.tree.parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    return seen


def load_kernel(model: LoadedModel) -> Kernel | None:
    """The kernel for a model on CPU, or `None` where it does not fit or no compiler is found."""
    if model.device.type != "cpu" or model.dtype not in _NAMES:
        return None
    if any(shape.head_dim > _MOST_DIM or shape.heads_per_kv > _MOST_VECTORS for shape in model.layers):
        return None
    library = _library(model.code_directory)
    return None if library is None else Kernel(library, model.dtype)


@cache
def _library(directory: str | None) -> ctypes.CDLL | None:
    """Build once per machine where `directory` keeps it, once per process otherwise."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        logger.warning("no C compiler: attention on this CPU falls back on a slower path")
        return None
    source = resources.files(__package__).joinpath("attention.c").read_bytes()
    try:
        if directory is not None:
            return ctypes.CDLL(str(_built(compiler, source, Path(directory))))
        with tempfile.TemporaryDirectory(prefix="pilotfish-") as temporary:
            return ctypes.CDLL(str(_built(compiler, source, Path(temporary))))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the attention kernel cannot be built, a slower path is taken: %s", error)
        return None


def _built(compiler: str, source: bytes, directory: Path) -> Path:
    """The shared library for this source, these flags and this processor. OpenMP is the one that torch has loaded."""
    identity = hashlib.sha256(b"\0".join((source, " ".join(_FLAGS).encode(), _processor()))).hexdigest()[:24]
    library = directory / f"attention-{identity}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as workplace:
        compiled, linked = Path(workplace, "attention.o"), Path(workplace, "attention.so")
        code = Path(workplace, "attention.c")
        code.write_bytes(source)
        for command in ([*_FLAGS, "-c", str(code), "-o", str(compiled)], ["-shared", str(compiled), "-o", str(linked)]):
            subprocess.run(  # noqa: S603 - our own source, with the compiler of this machine
                [compiler, *command], check=True, capture_output=True, timeout=_BUILD_SECONDS
            )
        os.replace(linked, library)  # several processes may build at once: the last one wins, all are the same
    return library


def _processor() -> bytes:
    """What `-march=native` stands for."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor().encode()
    return "".join(line for line in lines if line.startswith(("model name", "flags")))[:8192].encode()
