"""What the generation configuration of an encoder-decoder model fixes for every answer."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core import bounds
from cluster.core.errors import ModelLoadError
from cluster.core.request import BeamScoring, EarlyStopping
from workers.forward.loaded_model import GenerationDefaults

logger = logging.getLogger(__name__)

_UNREAD: Mapping[str, object] = {
    "begin_suppress_tokens": [],
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "repetition_penalty": 1,
    "sequence_bias": {},
}
"""Settings by which `transformers` changes answers and which are not read here, with the value that changes none."""


def read_generation_defaults(directory: Path) -> GenerationDefaults:
    """Read generation_config.json, or config.json where there is none, as `transformers` does.

    A start token that only config.json gives is taken from there. Raises `ModelLoadError` if neither gives one.
    """
    model, own = (_settings(directory / name) for name in ("config.json", "generation_config.json"))
    found = model if own is None else own
    starts = (_token(one or {}, name) for one in (own, model) for name in ("decoder_start_token_id", "bos_token_id"))
    start = next((token for token in starts if token is not None), None)
    if start is None or found is None:
        raise ModelLoadError(
            f"model directory {str(directory)!r}: decoder_start_token_id is missing in generation_config.json and "
            "config.json; the decoder of an encoder-decoder model starts with it"
        )
    unread = [name for name, unchanged in _UNREAD.items() if found.get(name, unchanged) != unchanged]
    if unread:
        names = ", ".join(unread)
        logger.warning("%s: answers do not follow %s of its generation configuration", directory.name, names)
    forced = _token(found, "forced_bos_token_id")
    reader = _Numbers(found, directory)
    decoder_start = (start,) if forced is None else (start, forced)
    ends = found.get("eos_token_id")
    ending = [[token] for token in (ends if isinstance(ends, list) else [ends])]
    words = [word for word in found.get("bad_words_ids") or () if word not in ending]  # as `transformers` reads them
    words += [[token] for token in found.get("suppress_tokens") or ()]
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


def _settings(file: Path) -> Mapping[str, Any] | None:
    """What a file sets; `None` where there is no such file."""
    if not file.is_file():
        return None
    return {key: value for key, value in json.loads(file.read_text("utf-8")).items() if value is not None}


def _token(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)
