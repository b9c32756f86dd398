"""The files of a model: its configuration and its weights.

A directory may have other weights: another library's form of them, or another type.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.core.errors import ModelLoadError

CONFIG = "config.json"
"""Name of the file with the configuration of a model or a draft."""
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def config_values(directory: Path) -> dict[str, Any]:
    """The object in a model's `config.json`; empty without a readable one, which loading the model reports."""
    try:
        found = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def is_encoder_decoder(directory: Path) -> bool:
    """Whether a model reads a source with an encoder and writes with a decoder, as its configuration says."""
    return bool(config_values(directory).get("is_encoder_decoder"))


def stated_layers(directory: Path) -> int | None:
    """The number of a model's decoder layers that its `config.json` states; `None` where it states none."""
    values = config_values(directory)
    of_text = values.get("text_config")
    names = ("decoder_layers", "num_decoder_layers") if values.get("is_encoder_decoder") else ()
    for part in (values, of_text if isinstance(of_text, dict) else {}):
        for name in (*names, "num_hidden_layers", "num_layers", "n_layer"):
            if isinstance(count := part.get(name), int):
                return count
    return None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that `transformers` loads: the only one, else those of the index, else all, by name.

    Raises `ModelLoadError` for an index that cannot be read, and for a file of it that is missing.
    """
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    where = f"model directory {str(directory)!r}: {_INDEX}"
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        missing = next((name for name in names if Path(name).name != name or not (directory / name).is_file()), None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{where} cannot be read: {error}") from error
    if missing is not None:
        raise ModelLoadError(f"{where} names {missing!r}; there is no such file")
    return [directory / name for name in names]
