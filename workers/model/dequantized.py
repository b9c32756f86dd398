"""What a model directory's weights are, or were before they were de-quantized: numbers of the quantized model."""

from __future__ import annotations

from pathlib import Path

from workers.model.packaged.catalogue import PACKAGED_MODELS
from workers.model.stored.source import stored_alone
from workers.model.weight_files import config_values

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


def weights_in_words(directory: Path, quantization: str) -> str:
    """How a target with this `target.quantization`, `none`, `stored` or `int8`, has the weights in its directory.

    It is in words, as `as they are stored (awq, 4 bits)`; empty for plain weights. Raises `ModelLoadError` if the file
    that they are stored in is gone.
    """
    if quantization == "int8":
        return "rounded to int8"
    settings = config_values(directory).get("quantization_config")
    if isinstance(settings, dict):
        bits = settings.get("bits")
        form = f"{settings.get('quant_method')}{f', {bits} bits' if bits else ''}"
        return f"as they are stored ({form})" if quantization == "stored" else f"de-quantized from {form}"
    form = dequantized_from(directory)
    if stored_alone(directory) is not None:
        return f"as they are stored ({form})"
    return f"de-quantized from {form}" if form else ""
