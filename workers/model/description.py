"""Whether the files of a model describe a whole one. Only headers are read, without torch.

A file that was cut off or fetched as a pointer is seen here, before anything starts.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from cluster.core.errors import ModelLoadError
from workers.model.draft_card import CARD
from workers.model.formats.checkpoint import safetensors_header
from workers.model.stored.source import stored_file
from workers.model.weight_files import weight_files

_GGUF = b"GGUF"
_WHOLE_GGUF = "a whole GGUF file of version 2 or 3"
_ALL_PARTS = "all parts of a GGUF file in one directory, under their own names"
_DIRECTORY = "a model directory with config.json and .safetensors files"
_POINTER = b"version https://git-lfs"
_CONFIG = "a JSON object with model_type, as `transformers` writes it"
_READ_FAILURES = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError, struct.error)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a model's file cannot be used."""

    file: Path
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{str(self.file)!r}: found {self.found}; needed {self.needed}"


def gguf_fault(file: Path) -> Fault | None:
    """What is wrong with a `.gguf` file, or with another part of its model, as far as headers and lengths show it.

    `None` for a whole one.
    """
    from workers.model.gguf_header import PartsError, parts_of, read_gguf

    parts = parts_of(file)
    for number, part in enumerate(parts, 1):
        if len(parts) > 1 and not part.is_file():
            return Fault(part, f"no part {number} of {len(parts)}", _ALL_PARTS)
        if (unread := _unread(part, _WHOLE_GGUF)) is not None:
            return unread
        with part.open("rb") as stream:
            start = stream.read(len(_GGUF))
        if start != _GGUF:
            return Fault(part, f"a file that begins with {start!r}", f"{_WHOLE_GGUF}, which begins with {_GGUF!r}")
    try:
        model = read_gguf(file)
    except PartsError as error:
        return Fault(file, str(error), _ALL_PARTS)
    except _READ_FAILURES as error:
        return Fault(file, f"a damaged file: {error}", _WHOLE_GGUF)
    if "general.architecture" not in model.fields:
        return Fault(file, "no key general.architecture", "a GGUF file with a model")
    return None if model.tensors else Fault(file, "no tensors", "a GGUF file with a model")


def directory_fault(directory: Path, *, stored: bool = False, drawn: bool = False) -> Fault | None:
    """What is wrong with a model's directory, as far as headers and lengths show it; `None` for a whole one.

    With `stored`, its weights may be in the GGUF file that it names; with `drawn`, it needs none.
    """
    config = directory / "config.json"
    if not config.is_file():
        return Fault(directory, "no config.json", _DIRECTORY)
    if (unread := _unread(config, _CONFIG)) is not None:
        return unread
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return Fault(config, f"a file that is not JSON: {error}", _CONFIG)
    if not isinstance(values, dict):
        return Fault(config, f"JSON of the type {type(values).__name__}", _CONFIG)
    if not isinstance(values.get("model_type"), str):
        return Fault(config, "no model_type", _CONFIG)
    if values["model_type"] == CARD:
        return Fault(config, "a drafting module", "a language model; draft.path is for drafts of any kind")
    if drawn:
        return None
    try:
        files = weight_files(directory)
        source = stored_file(directory) if stored and not files else None
    except ModelLoadError as error:
        return Fault(directory, str(error), "all files of the model")
    if source is not None:
        return gguf_fault(source)
    if not files:
        return Fault(directory, "no .safetensors file", _DIRECTORY)
    return next((fault for file in files if (fault := _weights_fault(file)) is not None), None)


def _weights_fault(file: Path) -> Fault | None:
    needed = "a whole safetensors file"
    if (unread := _unread(file, needed)) is not None:
        return unread
    try:
        ends = [entry["data_offsets"][1] for entry in safetensors_header(file).values()]
        with file.open("rb") as stream:
            first = 8 + int.from_bytes(stream.read(8), "little")
        end = first + max(ends, default=0)
    except _READ_FAILURES as error:
        return Fault(file, f"a file whose header cannot be read: {error}", needed)
    size = file.stat().st_size
    return None if size >= end else Fault(file, f"{size} bytes of the {end} that its header names", needed)


def _unread(file: Path, needed: str) -> Fault | None:
    """What is wrong with a file that cannot be read, is empty, or is a pointer of Git LFS to the real one."""
    try:
        with file.open("rb") as stream:
            start = stream.read(len(_POINTER))
    except OSError as error:
        return Fault(file, (error.strerror or str(error)).lower(), needed)
    if not start:
        return Fault(file, "an empty file", needed)
    return Fault(file, "a pointer of Git LFS", f"{needed}: run `git lfs pull`") if start == _POINTER else None
