"""A tokenizer seen as bytes: which tokens spell a text, and where in the text each of them ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cluster.core.errors import ConfigurationError
from cluster.core.token_bytes import PieceToBytes, reader

_FILE = "tokenizer.json"
_DIFFERENT = 0.01
"""Vocabularies of one size with at most this share of other tokens are the same one with other special tokens."""


class TextTokenizer:
    """Encodes texts without adding tokens to them, and tells the bytes of each token."""

    def __init__(self, tokenizer: Tokenizer, piece_to_bytes: PieceToBytes, *, strips_first_space: bool = False) -> None:
        """`strips_first_space`: the tokenizer adds a space before a text, and before what follows a special token."""
        self._tokenizer = tokenizer
        self._piece_to_bytes = piece_to_bytes
        self._bytes: dict[int, bytes] = {}
        self.strips_first_space = strips_first_space
        self.special_ids = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.opening = self._opening()
        """The tokens that a model reads before every text."""

    @classmethod
    def load(cls, directory: Path) -> TextTokenizer:
        """Read the `tokenizer.json` of a model directory.

        Raises `ConfigurationError` if there is none, or its decoder is not of byte-level or SentencePiece kind.
        """
        file = directory / _FILE
        try:
            content: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            decoder = content.get("decoder")
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises `Exception` itself for a file that it cannot read
            raise ConfigurationError(f"{file}: needed a tokenizer, found none; {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        piece_to_bytes, strips_first_space = reader(decoder)
        return cls(tokenizer, piece_to_bytes, strips_first_space=strips_first_space)

    def encode(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each text. Special tokens in a text become their ids."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [tuple(encoding.ids) for encoding in encodings]

    def encode_with_ends(self, text: str) -> tuple[tuple[int, ...], list[int]]:
        """Return the tokens of a text, and where each of them ends in it, in bytes `[tokens]`, ascending.

        Tokens of a tokenizer that normalizes the text end behind the characters that they are made of.
        """
        (tokens,) = self.encode([text])
        ends = self.ends(tokens, text.encode())
        if ends is None:
            lengths = [0, *accumulate(len(character.encode()) for character in text)]
            offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
            ends = [*accumulate((lengths[end] for _, end in offsets), max)]
        return tokens, ends

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text, also for special tokens; empty for an unused id."""
        known = self._bytes.get(token)
        if known is None:
            piece = self._tokenizer.id_to_token(token)
            known = self._bytes[token] = b"" if piece is None else self._piece_to_bytes(piece)
        return known

    def bytes_after(self, previous: int | None, token: int) -> bytes:
        """Return the bytes that a token adds after another one, without a space that the tokenizer adds there.

        `previous` is `None` where the text begins.
        """
        found = self.bytes_of(token)
        begins = self.strips_first_space and (previous is None or previous in self.special_ids)
        return found.removeprefix(b" ") if begins else found

    def has_piece_of(self, other: TextTokenizer, token: int) -> bool:
        """Whether the piece of a token of another vocabulary is a piece of this one."""
        piece = other._tokenizer.id_to_token(token)
        return piece is not None and self._tokenizer.token_to_id(piece) is not None

    def ends(self, tokens: Sequence[int], text: bytes) -> list[int] | None:
        """Return where each token ends in the text that it was encoded from, in bytes `[tokens]`.

        `None` if the tokens do not spell the text, as those of a tokenizer that normalizes it. A space that the
        tokenizer adds is not counted.
        """
        pieces = [self.bytes_of(token) for token in tokens]
        if b"".join(pieces) == text:
            return [*accumulate(map(len, pieces))]
        if not self.strips_first_space:
            return None
        specials = [index for index, token in enumerate(tokens) if token in self.special_ids]
        found: list[int] = []
        end, first = 0, 0
        for index in [*specials, len(tokens)]:
            part = pieces[first:index]
            special = pieces[index] if index < len(pieces) else b""
            added = _added_spaces(b"".join(part), special, text[end:])
            if added is None:
                return None
            lengths = accumulate(map(len, part), initial=end - added)
            found += [max(end, length) for length in [*lengths][1:]]
            end = (found[-1] if part else end) + len(special)
            found += [end] if index < len(pieces) else []
            first = index + 1
        return found if end == len(text) else None

    def _opening(self) -> tuple[int, ...]:
        text = "a"
        (plain,) = self.encode([text])
        whole = tuple(self._tokenizer.encode(text).ids)
        found = (index for index in range(len(whole)) if plain and whole[index : index + len(plain)] == plain)
        return whole[: next(found, 0)]


def _added_spaces(spelled: bytes, special: bytes, text: bytes) -> int | None:
    """How many spaces before `spelled` the text has not; `None` if it does not go on so.

    `special` follows, or nothing where it is empty.
    """
    for added in (0, 1):
        whole = spelled[added:] + special
        if spelled.startswith(b" " * added) and (text.startswith(whole) if special else text == whole):
            return added
    return None


def vocabulary_of(directory: Path) -> dict[str, int] | None:
    """Token ids by token, special tokens included; `None` if there is no plain vocabulary."""
    try:
        tokenizer = json.loads((directory / _FILE).read_text("utf-8"))
        tokens = tokenizer["model"]["vocab"]
        pairs = (
            tokens.items() if isinstance(tokens, dict) else ((entry[0], index) for index, entry in enumerate(tokens))
        )
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
        return dict(pairs) | added
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def same_tokens(target: Path, target_size: int, draft: Path, draft_size: int) -> bool | None:
    """Whether a token id means the same to a target and to its draft, by the tokenizers of their directories.

    Sizes are those of the models' vocabularies, in tokens. Without both tokenizers, `True` for equal sizes and `None`
    for others.
    """
    of_target, of_draft = vocabulary_of(target), vocabulary_of(draft)
    if of_target is None or of_draft is None:
        return True if target_size == draft_size else None
    different = sum(1 for token, index in of_target.items() if of_draft.get(token) != index)
    if target_size == draft_size:
        return different <= _DIFFERENT * len(of_target)
    return different == 0 and len(of_target) == len(of_draft)
