"""What the generation configuration of an encoder-decoder model fixes for every answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core import bounds
from cluster.core.errors import ModelLoadError
from cluster.core.request import BeamScoring, EarlyStopping
from workers.forward.loaded_model import GenerationDefaults


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
    reader = _Numbers(found, directory)
    decoder_start = (start,) if forced is None else (start, forced)
    words = [*(found.get("bad_words_ids") or ()), *([token] for token in found.get("suppress_tokens") or ())]
    return GenerationDefaults(
        decoder_start=decoder_start,
        forced_eos_token_id=_token(found, "forced_eos_token_id"),
        bad_words=tuple(dict.fromkeys(tuple(map(int, word)) for word in words)),
        no_repeat_ngram_size=reader.integer("no_repeat_ngram_size", bounds.MAX_NO_REPEAT_NGRAM),
        min_tokens=_min_tokens(reader, len(decoder_start)),
        beam_scoring=_beam_scoring(reader),
        renormalize_logits=found.get("renormalize_logits") is True,
    )


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Reads numbers of a generation configuration. Raises `ModelLoadError`."""

    found: Mapping[str, Any]
    directory: Path

    def integer(self, name: str, most: int) -> int:
        """An integer from 0 to `most`; 0 if it is missing."""
        value = self.found.get(name, 0)
        if not isinstance(value, int) or not 0 <= value <= most:
            raise self.refusal(name, f"an integer from 0 to {most}")
        return value

    def number(self, name: str, default: float, most: float) -> float:
        """A number from -`most` to `most`."""
        value = self.found.get(name, default)
        if not isinstance(value, int | float) or not -most <= value <= most:
            raise self.refusal(name, f"a number from {-most:g} to {most:g}")
        return float(value)

    def refusal(self, name: str, bound: str) -> ModelLoadError:
        """The error for a value that is outside of its bound."""
        return ModelLoadError(
            f"model directory {str(self.directory)!r}: {name}: {self.found[name]!r} is refused; it must be {bound}"
        )


def _min_tokens(reader: _Numbers, start_len: int) -> int:
    """Fewest tokens after the decoder's start. `min_length` counts all of it, `min_new_tokens` what is forced in it.

    `min_new_tokens` has precedence, as in `transformers`.
    """
    whole, new = reader.integer("min_length", bounds.MAX_TOKENS), reader.integer("min_new_tokens", bounds.MAX_TOKENS)
    return max(0, (new + 1 if "min_new_tokens" in reader.found else whole) - start_len)


def _beam_scoring(reader: _Numbers) -> BeamScoring:
    ending = reader.found.get("early_stopping", False)
    if ending not in (True, False, "never"):
        raise reader.refusal("early_stopping", "true, false or never")
    stopping = EarlyStopping.NEVER if ending == "never" else EarlyStopping.YES if ending else EarlyStopping.NO
    return BeamScoring(reader.number("length_penalty", 1.0, bounds.MAX_LENGTH_PENALTY), stopping)


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
