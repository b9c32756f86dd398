"""What the generation configuration of an encoder-decoder model fixes for every answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core import bounds
from cluster.core.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Tokens that the model's authors fixed. See `TargetInfo` for the fields."""

    decoder_start: tuple[int, ...]
    forced_eos_token_id: int | None
    bad_words: tuple[tuple[int, ...], ...]
    no_repeat_ngram_size: int = 0
    renormalize_logits: bool = False
    """Log-probabilities are those among the tokens that can be chosen."""


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read generation_config.json, or else config.json. Raises `ModelLoadError` if no start token is given."""
    found = _merged(directory)
    start = _token(found, "decoder_start_token_id")
    if start is None:
        start = _token(found, "bos_token_id")
    if start is None:
        raise ModelLoadError(
            f"model directory {str(directory)!r}: decoder_start_token_id is missing in generation_config.json and "
            "config.json; the decoder of an encoder-decoder model starts with it"
        )
    forced = _token(found, "forced_bos_token_id")
    words = [*(found.get("bad_words_ids") or ()), *([token] for token in found.get("suppress_tokens") or ())]
    return GenerationDefaults(
        decoder_start=(start,) if forced is None else (start, forced),
        forced_eos_token_id=_token(found, "forced_eos_token_id"),
        bad_words=tuple(dict.fromkeys(tuple(map(int, word)) for word in words)),
        no_repeat_ngram_size=_no_repeat_ngram_size(found, directory),
        renormalize_logits=found.get("renormalize_logits") is True,
    )


def _no_repeat_ngram_size(found: Mapping[str, Any], directory: Path) -> int:
    size = found.get("no_repeat_ngram_size", 0)
    if not isinstance(size, int) or not 0 <= size <= bounds.MAX_NO_REPEAT_NGRAM:
        raise ModelLoadError(
            f"model directory {str(directory)!r}: no_repeat_ngram_size: {size!r} is refused; it must be an integer "
            f"from 0 to {bounds.MAX_NO_REPEAT_NGRAM}"
        )
    return size


def _merged(directory: Path) -> Mapping[str, Any]:
    """Both files; what generation_config.json says has precedence, as in `transformers`."""
    merged: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        file = directory / name
        if file.is_file():
            merged |= {key: value for key, value in json.loads(file.read_text("utf-8")).items() if value is not None}
    return merged


def _token(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)
