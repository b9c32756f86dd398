"""The bytes of each vocabulary entry, from the `decoder` of a `tokenizer.json`.

The text of an answer is the UTF-8 decoding of its tokens' bytes. This makes incremental detokenization exact, however
the tokens are grouped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cluster.core.errors import ConfigurationError

PieceToBytes = Callable[[str], bytes]
METASPACE: Mapping[str, Any] = MappingProxyType({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"})
"""The decoder of SentencePiece models: `▁` is a space, and texts begin with an added one."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def reader(decoder: Mapping[str, Any] | None) -> tuple[PieceToBytes, bool]:
    """Return the function that converts a vocabulary entry, and whether the tokenizer adds a first space to texts.

    Supports byte-level vocabularies (GPT-2, Llama 3, Qwen) and SentencePiece-like ones (Llama 2, Gemma).
    Raises `ConfigurationError` for any other kind.
    """
    steps = _flatten(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds:
        return byte_level_bytes, False
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece(steps), any(_strips_start(step) for step in steps)
    raise ConfigurationError(
        f"tokenizer.json: needed a decoder of byte-level or SentencePiece kind, found {kinds or 'none'}"
    )


def byte_level_bytes(piece: str) -> bytes:
    """Convert a piece in GPT-2's alphabet to bytes. A piece with other letters stands for itself."""
    try:
        return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
    except KeyError:
        return piece.encode()


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's letter for each byte: itself if it is printable Latin-1, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


_BYTE_OF_LETTER = {letter: byte for byte, letter in byte_alphabet().items()}


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _sentencepiece(steps: list[Mapping[str, Any]]) -> PieceToBytes:
    replacements = [pair for step in steps if (pair := _replacement(step)) is not None]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(piece: str) -> bytes:
        if has_bytes and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    return to_bytes


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _strips_start(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] > 0)
    return bool(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
