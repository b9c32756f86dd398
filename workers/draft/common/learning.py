"""What a drafter learns from: texts of finished requests, kept in memory within a bound and apart by salt.

Only texts whose request allows it are kept. A quarter of the texts of a salt is held back: no training sees them, and
candidates are measured on them. A fifth is left out of the steps of every training, and chooses its best state: weights
that an earlier training has learned from a text would seem better on it than any that follow.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from cluster.core.ports import DraftMethod
from cluster.core.request import SequenceStart

if TYPE_CHECKING:
    from torch import Tensor

_HELD_BACK, _LEFT_OUT = 0.25, 0.2
"""Shares of the texts that are held back, and left out of trainings."""
_TOKEN_BYTES, _TEXT_BYTES = 36, 1024
"""Memory of a token, a number of Python, and of what else a text has, in bytes."""
_MOST_TEXTS = 1024
"""Most texts of a salt: more than any training sees."""
_MOST_SALTS = 64
"""Most salts whose texts are kept."""


@dataclass(frozen=True, slots=True)
class CollectedText:
    """The committed tokens of one sequence, and what the target showed of it at consecutive positions.

    These positions begin where the method wants it, at the latest at the end of the prompt if the target showed it.
    """

    start: SequenceStart
    tokens: tuple[int, ...]
    """Prompt and answer."""
    first: int
    """Position of the first row of `hidden`."""
    hidden: Tensor
    """[positions, taps x hidden size], bfloat16, in memory of the CPU: the taps that the target takes, in their order.

    These are the taps that the method reads, and the last layer's output, from which the target's probabilities follow.
    """

    failures: tuple[int, ...] = ()
    """Positions of tokens in whose place the target rejected all that was drafted, ascending."""

    @property
    def base_len(self) -> int:
        """Tokens before the first draft, which follows the first known hidden state from the end of the prompt on."""
        return 1 + max(self.start.prompt_len, self.first + 1)

    @property
    def size(self) -> int:
        """Bytes that the text takes."""
        hidden = self.hidden.numel() * self.hidden.element_size()
        return hidden + (len(self.tokens) + len(self.failures)) * _TOKEN_BYTES + _TEXT_BYTES


@dataclass(frozen=True, slots=True)
class TextsOfSalt:
    """The kept texts of one salt, oldest first."""

    key: str
    """`salt_key` of the salt."""
    client: str
    """The name of the API key of the salt; empty without keys, and where keys share."""
    seen: int
    """Texts collected since the start, those included that are kept no longer."""
    training: tuple[CollectedText, ...]
    left_out: tuple[CollectedText, ...]
    held_back: tuple[CollectedText, ...]


class Reservoir:
    """Texts by salt. Any thread may call it.

    Finished texts take at most half of `most_bytes`, and those that are still collected the other half. The oldest text
    of the client that takes the most memory is dropped first, so that no client drops another one's.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes // 2
        self._lock = threading.Lock()
        self._texts: dict[str, _Texts] = {}
        self._seen = 0
        self._stored = 0
        self._collecting = 0
        self._is_closed = False

    @property
    def seen(self) -> int:
        """Texts that were collected since the start."""
        return self._seen

    @property
    def most_bytes(self) -> int:
        """Bytes that all texts may take, finished or not."""
        return 2 * self._most_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes that all finished texts take together."""
        return self._stored

    def reserve(self, size: int) -> bool:
        """Count bytes of a text that is still collected. Returns `False` if there is no room."""
        with self._lock:
            if self._collecting + size > self._most_bytes:
                return False
            self._collecting += size
            return True

    def free(self, size: int) -> None:
        """Count no more what `reserve` counted."""
        with self._lock:
            self._collecting -= size

    def add(self, text: CollectedText) -> None:
        """Keep a text if its request allows it and if it fits."""
        if not text.start.allows_learning:
            return
        salt = text.start.cache_salt
        key = salt_key(salt)
        with self._lock:
            if self._is_closed or text.size > self._most_bytes:
                return
            texts = self._texts.pop(key, None) or _Texts(client_of(salt))
            self._texts[key] = texts  # the last one of these is the latest
            self._stored += texts.add(text, _share(key, texts.seen))
            self._seen += 1
            while self._stored > self._most_bytes:
                self._stored -= self._of_largest_client(lambda one: one.size).drop_oldest()
            if len(self._texts) > _MOST_SALTS:
                oldest = self._oldest()
                self._texts = {one: kept for one, kept in self._texts.items() if kept is not oldest}
                self._stored -= oldest.size

    def close(self) -> None:
        """Drop all finished texts, and keep none from now on."""
        with self._lock:
            self._is_closed, self._stored = True, 0
            self._texts.clear()

    def salts(self) -> tuple[TextsOfSalt, ...]:
        """The texts of all salts."""
        with self._lock:
            return tuple(texts.of(key) for key, texts in self._texts.items())

    def _of_largest_client(self, measure: Callable[[_Texts], int]) -> _Texts:
        """The largest salt, by `measure`, of the client whose salts are the largest together."""
        clients: Counter[str] = Counter()
        for texts in self._texts.values():
            clients[texts.client] += measure(texts)
        (client, _), *_ = clients.most_common(1)
        return max((texts for texts in self._texts.values() if texts.client == client), key=measure)

    def _oldest(self) -> _Texts:
        """The salt whose last text is the oldest, among those of the client with the most salts."""
        client = self._of_largest_client(lambda _: 1).client
        return next(texts for texts in self._texts.values() if texts.client == client)


class _Texts:
    """The texts of one salt, oldest first."""

    def __init__(self, client: str) -> None:
        self.client = client
        """The name of the API key."""
        self.seen = 0
        self.size = 0
        self._parts: tuple[deque[CollectedText], ...] = (deque(), deque(), deque())
        """Held back, left out, and to train on. They are kept apart, because `of` is called where requests may wait."""
        self._order: deque[deque[CollectedText]] = deque()
        """The part of each text."""

    def add(self, text: CollectedText, share: float) -> int:
        """Add a text. Returns the bytes that the texts have grown by."""
        before = self.size
        part = self._parts[bisect_right((_HELD_BACK, _HELD_BACK + _LEFT_OUT), share)]
        part.append(text)
        self._order.append(part)
        self.seen += 1
        self.size += text.size
        if len(self._order) > _MOST_TEXTS:
            self.drop_oldest()
        return self.size - before

    def drop_oldest(self) -> int:
        """Drop the oldest text. Returns its bytes."""
        dropped = self._order.popleft().popleft().size
        self.size -= dropped
        return dropped

    def of(self, key: str) -> TextsOfSalt:
        held_back, left_out, training = map(tuple, self._parts)
        return TextsOfSalt(key, self.client, self.seen, training, left_out, held_back)


class LearnedWeights(Protocol):
    """The weights of a method: those of the draft's files, and others for the requests of some salts.

    Another thread than that of `propose` may call it. A key is the `salt_key` of a salt.
    """

    @property
    def bytes_each(self) -> int:
        """Most memory that the learned weights of one salt take, in bytes."""

    @property
    def saved_bytes(self) -> int:
        """Most bytes of the files that `save` writes.

        Raises `OSError`, and `ValueError` where the draft's files cannot be read.
        """

    def of(self, key: str) -> Mapping[str, Tensor]:
        """The parameters by name, float32, that draft for the requests of a salt with this key."""

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` for parameters of other names or shapes, or with values that are not finite."""

    def replace(self, key: str, weights: Mapping[str, Tensor] | None) -> None:
        """Draft with these parameters for the requests of one salt from the next call of `propose` on.

        `None` takes the parameters of the draft's files. Raises `ValueError` as `check` does, and `RuntimeError` where
        the method cannot compute with them.
        """

    def save(self, directory: Path, weights: Mapping[str, Tensor]) -> None:
        """Write a draft of these parameters, in the format of the draft's files, into an existing directory.

        What else these files have is copied. Raises `OSError`, and `ValueError` for files that cannot be read.
        """

    def read(self, directory: Path) -> Mapping[str, Tensor]:
        """The parameters of a draft that `save` wrote, float32.

        Raises `ValueError` for a draft of another target or of other sizes, and as `check` does.
        """


@runtime_checkable
class LearnsOnline(DraftMethod, Protocol):
    """A `DraftMethod` that collects texts, and whose weights can be replaced for the requests of one salt."""

    @property
    def weights(self) -> LearnedWeights | None:
        """The weights; `None` where the format of the draft cannot be trained."""

    @property
    def default_text_bytes(self) -> int:
        """Memory for texts where `draft.learn_text_bytes` is unset, in bytes: enough for trainings, within bounds."""

    def collect_into(self, reservoir: Reservoir) -> None:
        """Add the texts of finished sequences to `reservoir` from now on."""

    def ignore_times(self) -> None:
        """Draft as if drafts took no time: where texts are drafted anew, no step of a target passes in between."""


@lru_cache(1024)
def salt_key(salt: str) -> str:
    """A name for a salt, 32 hexadecimal digits, that does not tell the salt. Each draft asks for it several times."""
    return blake2b(salt.encode(), digest_size=16, person=b"pilotfish learn").hexdigest()


def client_of(salt: str) -> str:
    """The name of the API key that a salt belongs to; empty without keys, and where keys share."""
    return salt.partition("/")[0]


def _share(key: str, number: int) -> float:
    """A number from 0 to 1 that looks random, so that no period of the traffic decides what is held back."""
    return blake2b(f"{key}/{number}".encode(), digest_size=1).digest()[0] / 256


def consecutive(pieces: Sequence[tuple[int, Tensor]]) -> tuple[int, Tensor] | None:
    """The last run of consecutive positions among pieces (first position, rows), oldest first; `None` without any.

    Of a position that is in several pieces, the latest row is taken.
    """
    import torch

    latest = sorted(((first + len(piece), first) for first, piece in pieces if len(piece)), reverse=True)
    if not latest:
        return None
    end, begin = latest[0]
    for piece_end, first in latest:
        if piece_end < begin:
            break
        begin = min(begin, first)
    kept = [(first, piece) for first, piece in pieces if first >= begin and len(piece)]
    if sum(len(piece) for _, piece in kept) == end - begin:  # as almost always, no position is in two pieces
        return begin, torch.cat([piece for _, piece in sorted(kept, key=lambda one: one[0])])
    rows = torch.empty((end - begin, *kept[0][1].shape[1:]), dtype=kept[0][1].dtype)
    for first, piece in kept:
        rows[first - begin : first - begin + len(piece)] = piece
    return begin, rows
