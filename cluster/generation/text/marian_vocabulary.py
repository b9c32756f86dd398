"""The vocabulary of a MarianMT model: one SentencePiece model per language, and one table of ids for both.

`transformers` makes the same tokens (`MarianTokenizer` without `sacremoses`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from cluster.core.errors import ConfigurationError

_SOURCE, _TARGET, _IDS, _OTHER_IDS = "source.spm", "target.spm", "vocab.json", "target_vocab.json"
_END, _UNKNOWN, _PADDING = "</s>", "<unk>", "<pad>"
_LANGUAGE = re.compile(r">>.*?<<", re.DOTALL)
"""The code of the target language, at the start of a source for a model of several languages."""


def is_marian(directory: Path) -> bool:
    """Whether a model directory has the tokenizer files of a MarianMT model."""
    return (directory / _SOURCE).is_file() and not (directory / "tokenizer.json").is_file()


class MarianVocabulary:
    """The tokens of a Marian model: it reads with the source's SentencePiece model, and writes with the target's."""

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigurationError` if a file is missing, unreadable or of an unknown kind."""
        if (directory / _OTHER_IDS).is_file():
            raise ConfigurationError(f"{directory / _OTHER_IDS}: needed one vocabulary for both languages, found two")
        self._source = _Pieces(directory / _SOURCE)
        self._target = _Pieces(directory / _TARGET)
        self._ids = _read_ids(directory / _IDS)
        self._pieces = {token: piece for piece, token in self._ids.items()}
        self._end, self._unknown = self._ids[_END], self._ids[_UNKNOWN]
        special = [piece for piece in (_END, _UNKNOWN, _PADDING) if piece in self._ids]
        self._special = re.compile(f"({'|'.join(map(re.escape, special))})")
        self.special_ids = frozenset(self._ids[piece] for piece in special)
        self.longest_piece = max(map(len, self._ids))

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        tokens = self._encode(text, self._source)
        return (*tokens, self._end) if add_special_tokens else tokens

    def encode_answer(self, text: str) -> tuple[int, ...]:
        return self._encode(text, self._target)

    def piece(self, token: int) -> str | None:
        return self._pieces.get(token)

    def token(self, piece: str) -> int | None:
        return self._ids.get(piece)

    def _encode(self, text: str, model: _Pieces) -> tuple[int, ...]:
        found: list[str] = []
        for number, part in enumerate(self._special.split(text)):
            if number % 2:  # a special token
                found.append(part)
                continue
            if language := _LANGUAGE.match(part):
                found.append(language[0])
                part = part[language.end() :]
            found.extend(model.split(part))
        return tuple(self._ids.get(piece, self._unknown) for piece in found)


class _Pieces:
    """A SentencePiece model, which splits text into pieces."""

    def __init__(self, path: Path) -> None:
        # Few models need the library, and it is loaded for these only.
        try:
            import sentencepiece
        except ImportError:
            raise ConfigurationError(
                f"{path}: a SentencePiece model needs the package sentencepiece, which is not installed; "
                "run `pip install 'pilotfish[translation]'`"
            ) from None
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
        except (OSError, RuntimeError) as error:
            raise ConfigurationError(f"{path}: needed a SentencePiece model, found: {error}") from None

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text. Unknown text is one piece of its own."""
        pieces: list[str] = self._model.encode(text, out_type=str)
        return pieces


def _read_ids(path: Path) -> Mapping[str, int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: needed JSON, found: {error}") from None
    if not isinstance(ids, dict) or not all(isinstance(token, int) for token in ids.values()):
        raise ConfigurationError(f"{path}: needed an object of pieces with their ids")
    for piece in (_END, _UNKNOWN):
        if piece not in ids:
            raise ConfigurationError(f"{path}: needed the piece {piece}, found {len(ids)} others")
    return ids
