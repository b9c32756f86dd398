"""Reads a MarianMT checkpoint with pickled weights from a part of a ZIP archive, and converts it to safetensors."""

from __future__ import annotations

import shutil
import struct
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig

from cluster.core.errors import ModelLoadError

_WEIGHTS = "pytorch_model.bin"
_COPIED = ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json")
_TIED = frozenset({"lm_head.weight"})


def convert_marian(source: Path, destination: Path) -> None:
    """Write the model in `source` to `destination`: safetensors, configurations, and the tokenizer's files unchanged.

    Nothing but tensors is taken from the pickle. Raises `ModelLoadError`.
    """
    try:
        weights = torch.load(source / _WEIGHTS, map_location="cpu", weights_only=True)
        config = AutoConfig.from_pretrained(source)
        generation = GenerationConfig.from_pretrained(source)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        left = model.load_state_dict(weights, strict=False)
        if left.unexpected_keys or not _TIED.issuperset(left.missing_keys):
            raise ValueError(f"missing {left.missing_keys}, unexpected {left.unexpected_keys}")
        model.tie_weights()
        model.generation_config = generation
        model.save_pretrained(destination)
        for name in _COPIED:
            shutil.copyfile(source / name, destination / name)
    except Exception as error:  # the reader of a broken file may raise anything
        raise ModelLoadError(f"MarianMT checkpoint {str(source)!r} cannot be converted: {error}") from error


_HEADER = struct.Struct("<4s5H3I2H")
_SIGNATURE = b"PK\x03\x04"
_STORED, _DEFLATED = 0, 8
_CHUNK = 1 << 20


def extract_entries(source: Path, destination: Path) -> tuple[Path, ...]:
    """Write the files of consecutive entries to `destination`, without their folders. Returns the paths written.

    The other parts of the ZIP archive `source`, the directory among them, are missing. Raises `ModelLoadError` for
    anything that is not a whole entry with sizes in its header.
    """
    written: list[Path] = []
    with source.open("rb") as stream:
        while header := stream.read(_HEADER.size):
            if len(header) < _HEADER.size:
                raise _broken(source, "it ends within the header of an entry")
            signature, _, flags, method, _, _, checksum, packed, size, name_length, extra_length = _HEADER.unpack(
                header
            )
            if signature != _SIGNATURE or flags & 0b1001 or method not in (_STORED, _DEFLATED):
                raise _broken(source, f"no plain entry at byte {stream.tell() - _HEADER.size}")
            name = stream.read(name_length).decode(errors="replace")
            stream.seek(extra_length, 1)
            if name.endswith("/"):  # a folder
                stream.seek(packed, 1)
                continue
            path = destination / PurePosixPath(name).name
            if _unpack(stream, packed, method == _DEFLATED, path) != (checksum, size):
                raise _broken(source, f"the entry {name!r} has another size or checksum than its header says")
            written.append(path)
    return tuple(written)


def _unpack(stream: BinaryIO, packed: int, is_deflated: bool, path: Path) -> tuple[int, int]:
    """Write the next `packed` bytes, unpacked, to `path`. Returns the CRC-32 and the size of what was written."""
    checksum = size = 0
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)
    with path.open("wb") as file:
        while packed > 0 and (chunk := stream.read(min(packed, _CHUNK))):
            packed -= len(chunk)
            try:
                content = unpacker.decompress(chunk) if is_deflated else chunk
            except zlib.error:
                break
            checksum = zlib.crc32(content, checksum)
            size += file.write(content)
    return checksum, size


def _broken(source: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"ZIP entries in {str(source)!r} cannot be read: {reason}")
