"""What a drafter learns from: texts of finished requests, kept in memory within a bound and apart by salt.

Only texts whose request allows it are kept. A quarter of the texts of a salt is held back: no training sees them, and
candidates are measured on them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cluster.core.ports import DraftMethod
from cluster.core.request import SequenceStart

if TYPE_CHECKING:
    from torch import Tensor

_HELD_BACK = 0.25
"""Share of the texts that is held back."""
_TOKEN_BYTES = 8
_MOST_SALTS = 64
"""Most salts whose texts are kept, and most whose requests have weights of their own."""


@dataclass(frozen=True, slots=True)
class CollectedText:
    """The committed tokens of one sequence, and the target's hidden states at consecutive positions of them."""

    start: SequenceStart
    tokens: tuple[int, ...]
    """Prompt and answer."""
    first: int
    """Position of the first row of `hidden`."""
    hidden: Tensor
    """[positions, hidden size], bfloat16, in memory of the CPU."""

    @property
    def size(self) -> int:
        """Bytes that the text takes."""
        return self.hidden.numel() * self.hidden.element_size() + len(self.tokens) * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TextsOfSalt:
    """The kept texts of one salt, oldest first."""

    key: str
    """`salt_key` of the salt."""
    seen: int
    """Texts collected since the start, those included that are kept no longer."""
    training: tuple[CollectedText, ...]
    held_back: tuple[CollectedText, ...]


class Reservoir:
    """Texts by salt, at most `most_bytes` together. Any thread may call it.

    The oldest text of the salt that takes the most memory is dropped first, so that no client drops another one's.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._texts: dict[str, deque[tuple[bool, CollectedText]]] = {}
        self._bytes: dict[str, int] = {}
        self._seen: dict[str, int] = {}

    @property
    def seen(self) -> int:
        """Texts that were collected since the start."""
        return sum(self._seen.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes that all texts take together."""
        return sum(self._bytes.values())

    def add(self, text: CollectedText) -> None:
        """Keep a text if its request allows it and if it fits. A salt beyond the most that are kept is left out."""
        if not text.start.allows_learning or text.size > self._most_bytes:
            return
        key = salt_key(text.start.cache_salt)
        with self._lock:
            if key not in self._texts and len(self._texts) >= _MOST_SALTS:
                return
            number = self._seen.get(key, 0)
            self._seen[key] = number + 1
            is_held_back = _share(key, number) < _HELD_BACK
            self._texts.setdefault(key, deque()).append((is_held_back, text))
            self._bytes[key] = self._bytes.get(key, 0) + text.size
            while self.stored_bytes > self._most_bytes:
                largest = max(self._bytes, key=self._bytes.__getitem__)
                self._bytes[largest] -= self._texts[largest].popleft()[1].size

    def salts(self) -> tuple[TextsOfSalt, ...]:
        """The texts of all salts."""
        with self._lock:
            return tuple(
                TextsOfSalt(
                    key,
                    self._seen[key],
                    tuple(text for is_held_back, text in texts if not is_held_back),
                    tuple(text for is_held_back, text in texts if is_held_back),
                )
                for key, texts in self._texts.items()
            )


@runtime_checkable
class LearnsOnline(DraftMethod, Protocol):
    """A `DraftMethod` that collects texts, and whose weights can be replaced for the requests of one salt."""

    def collect_into(self, reservoir: Reservoir) -> None:
        """Add the texts of finished sequences to `reservoir` from now on."""
        ...

    def weights_of(self, key: str) -> Mapping[str, Tensor]:
        """The parameters by name, float32, that draft for the requests of a salt with this key."""
        ...

    def replace_weights(self, key: str, weights: Mapping[str, Tensor] | None) -> None:
        """Draft with these parameters for the requests of one salt from the next call of `propose` on.

        `None` takes the parameters that the method was loaded with. Another thread than that of `propose` may call it.
        Raises `ValueError` for parameters of other names or shapes, or with values that are not finite.
        """
        ...


def salt_key(salt: str) -> str:
    """A name for a salt, 32 hexadecimal digits, that does not tell the salt."""
    return blake2b(salt.encode(), digest_size=16, person=b"pilotfish learn").hexdigest()


def _share(key: str, number: int) -> float:
    """A number from 0 to 1 that looks random, so that no period of the traffic decides what is held back."""
    return blake2b(f"{key}/{number}".encode(), digest_size=1).digest()[0] / 256


def consecutive(pieces: Sequence[tuple[int, Tensor]]) -> tuple[int, Tensor] | None:
    """The last run of consecutive positions among pieces (first position, rows), oldest first; `None` without any.

    Of a position that is in several pieces, the latest row is taken.
    """
    import torch

    rows = {first + index: row for first, piece in pieces for index, row in enumerate(piece)}
    if not rows:
        return None
    end = max(rows)
    first = end
    while first - 1 in rows:
        first -= 1
    return first, torch.stack([rows[position] for position in range(first, end + 1)])
