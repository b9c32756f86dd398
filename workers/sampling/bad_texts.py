"""Texts that no word of an answer begins with, whatever the tokens that spell them.

A text is looked for in the bytes of the answer, so it does not matter how a tokenizer splits it. A token is excluded
where it completes a text that begins a word: at the beginning of the answer, or after a character that is neither a
letter nor a digit. Scripts that do not separate words, such as Chinese, have such a beginning at every character.
"""

from __future__ import annotations

import json
import unicodedata
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from cluster.core.token_bytes import reader

_SEPARATOR = b"\xff"
"""A byte that no text in UTF-8 has."""
_MOST_KNOWN = 4096
"""Most beginnings whose tokens are remembered."""
_LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8."""


class TokenTexts:
    """The bytes of every token of a vocabulary. Special tokens have none, because they are no text."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` are indexed by token."""
        self.texts = texts
        self._tokens = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._tokens]
        self._joined = _SEPARATOR.join(texts)
        self._starts = [*accumulate((len(text) + 1 for text in texts), initial=0)]
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()

    @classmethod
    def load(cls, directory: Path, vocabulary_size: int) -> TokenTexts:
        """Read the `tokenizer.json` of a model directory. Raises `ConfigurationError` if it has none that is known."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(f"the model has no {path.name}, so its tokens have no text")
        content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        to_bytes, _ = reader(content.get("decoder"))
        pieces = content["model"]["vocab"]
        entries = pieces.items() if isinstance(pieces, dict) else ((piece[0], id_) for id_, piece in enumerate(pieces))
        found = {token: to_bytes(piece) for piece, token in entries}
        for added in content.get("added_tokens", ()):
            found[added["id"]] = b"" if added["special"] else to_bytes(added["content"])
        return cls([found.get(token, b"") for token in range(vocabulary_size)])

    def beginning_with(self, text: bytes) -> Tensor:
        """Return the tokens that begin with `text`, int64 [tokens]."""
        if text not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.popitem(last=False)
            first = bisect_left(self._sorted, text)
            last = bisect_right(self._sorted, text, lo=first, key=lambda other: other[: len(text)])
            self._known[text] = torch.tensor(self._tokens[first:last], dtype=torch.int64)
        return self._known[text]

    def containing(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Yield the tokens that contain `text`, and where, in bytes."""
        at = self._joined.find(text)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            yield token, at - self._starts[token]
            at = self._joined.find(text, at + 1)


class BadTexts:
    """The texts that one request forbids, for one vocabulary."""

    def __init__(self, tokens: TokenTexts, texts: Sequence[str]) -> None:
        self._tokens = tokens
        words = {word for text in texts if (word := text.lstrip())}
        self._longest = max((len(word.encode()) for word in words), default=0)
        self._rests: dict[bytes, list[tuple[bytes, bool]]] = {}
        """What is left of the texts after each of their beginnings, and whether it counts where a word begins alone."""
        self._inside = torch.ones(len(tokens.texts), dtype=torch.bool)
        """bool [vocabulary]: false for tokens that contain a text wherever they stand."""
        self._at_start = torch.ones(len(tokens.texts), dtype=torch.bool)
        """bool [vocabulary]: false for tokens that contain a text where a word may begin with them."""
        for word in words:
            self._add(word.encode(), _joins(word[0]))
        self._at_start &= self._inside

    def _add(self, word: bytes, joins: bool) -> None:
        """Take a text. One that `joins` the word before it counts where a word begins alone."""
        for length in range(1, len(word)):
            self._rests.setdefault(word[:length], []).append((word[length:], joins))
        for token, at in self._tokens.containing(word):
            if not joins or (at > 0 and _begins_word(self._tokens.texts[token], at)):
                self._inside[token] = False
            elif at == 0:
                self._at_start[token] = False

    def allowed(self, answer: Sequence[int], begin: int) -> Tensor:
        """Return bool [vocabulary]: the tokens that complete no text after `answer`, which begins at index `begin`."""
        tail = self._tail(answer, begin)
        found = (self._at_start if _begins_word(tail, len(tail)) else self._inside).clone()
        for length in range(1, min(self._longest - 1, len(tail)) + 1):
            for rest, joins in self._rests.get(tail[-length:], ()):
                if not joins or _begins_word(tail, len(tail) - length):
                    found[self._tokens.beginning_with(rest)] = False
        return found

    def _tail(self, answer: Sequence[int], begin: int) -> bytes:
        """Return the last bytes of the answer: all that a text and the character before it can have."""
        parts: list[bytes] = []
        left = self._longest + _LONGEST_CHARACTER
        for index in range(len(answer) - 1, begin - 1, -1):
            parts.append(self._tokens.texts[answer[index]])
            left -= len(parts[-1])
            if left <= 0:
                break
        return b"".join(reversed(parts))


def _begins_word(text: bytes, at: int) -> bool:
    """Whether a word may begin at byte `at` of a text: the character before it is no letter or digit."""
    before = text[max(0, at - _LONGEST_CHARACTER) : at].decode("utf-8", "replace")
    return not before or not _joins(before[-1])


def _joins(character: str) -> bool:
    """Whether a character is a letter or a digit of a script that separates words by spaces."""
    return character.isalnum() and unicodedata.category(character) != "Lo"
