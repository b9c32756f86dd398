"""What kind of model a directory holds."""

from __future__ import annotations

import json
from pathlib import Path


def is_encoder_decoder(directory: Path) -> bool:
    """Whether the model reads a source with an encoder and writes with a decoder."""
    return bool(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("is_encoder_decoder", False))
