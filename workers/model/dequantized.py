"""What a model directory's weights were before they were de-quantized: its numbers are those of the quantized model."""

from __future__ import annotations

from pathlib import Path

from workers.model.packaged.catalogue import PACKAGED_MODELS

_FILE = "dequantized_from.txt"
_MOST_CHARACTERS = 200


def write_dequantized_from(directory: Path, quantized: str) -> None:
    """Note in `directory` what its weights were, as `GGUF Q4_1, Q8_0`."""
    (directory / _FILE).write_text(quantized[:_MOST_CHARACTERS], "utf-8")


def dequantized_from(directory: Path) -> str:
    """What the weights in `directory` were before they were de-quantized; empty if they are as published.

    A packaged model that was converted without a note is known by its name.
    """
    file = directory / _FILE
    if file.is_file():
        return file.read_text("utf-8")[:_MOST_CHARACTERS]
    packaged = PACKAGED_MODELS.get(directory.name)
    return "" if packaged is None else packaged.quantized
