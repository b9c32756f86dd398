"""Vocabularies: what turns text into token ids, and a token id into its piece of text."""

from __future__ import annotations

from typing import Protocol

import tokenizers


class Vocabulary(Protocol):
    """The tokens of a model. Thread-safe."""

    special_ids: frozenset[int]
    """The ids of the special tokens."""
    longest_piece: int
    """Most characters of a piece."""

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the token ids of a text that the model reads. Special tokens in the text become their ids."""

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that the model writes, without added special tokens."""

    def piece(self, token: int) -> str | None:
        """Return the piece of a token id; `None` for an unused id."""

    def token(self, piece: str) -> int | None:
        """Return the token id of a piece; `None` if there is none."""


class JsonVocabulary:
    """The vocabulary of a `tokenizer.json`. The model reads and writes with the same tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_ids = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.longest_piece = max(map(len, tokenizer.get_vocab()), default=1)

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # A batch, because the library then computes without Python's lock, and no offsets, which nobody reads.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        return self.encode(text, add_special_tokens=False)

    def piece(self, token: int) -> str | None:
        found: str | None = self._tokenizer.id_to_token(token)
        return found

    def token(self, piece: str) -> int | None:
        found: int | None = self._tokenizer.token_to_id(piece)
        return found
