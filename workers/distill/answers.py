"""The target's answers as token ids, in a file with one JSON object per line that is appended to.

An answer may hold the target's most probable tokens at each of its tokens, and their log-probabilities: base64 of
little-endian int32 and float16.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self, TextIO

import numpy as np
import numpy.typing as npt

from cluster.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, eq=False)
class Leading:
    """The target's most probable tokens at each token of an answer, before temperature is applied."""

    tokens: npt.NDArray[np.int32]
    """[answer tokens, alternatives], most probable first."""
    log_probabilities: npt.NDArray[np.float16]
    """[answer tokens, alternatives], natural logarithms."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One turn of a conversation: the tokens that the target read, and the tokens that it wrote."""

    key: str
    """Identifies the task and the turn."""
    category: str
    temperature: float
    held_out: bool
    prompt: tuple[int, ...]
    """Token ids of the conversation before the answer, as the chat template formats it; for an encoder-decoder target
    the source, unless `source` has it."""
    answer: tuple[int, ...]
    """Token ids, with the end-of-turn token where the target wrote it."""
    leading: Leading | None = None
    """`None` where only the tokens of the answer are stored."""
    source: tuple[int, ...] = ()
    """What the encoder read, if `prompt` is the decoder's start. It is not stored in files."""
    weights: npt.NDArray[np.float32] | None = None
    """[answer tokens] Weights of the losses of the tokens; `None`: all are 1. They are not stored in files."""


class AnswerFile:
    """Appends answers to a file, and lists which answers the file holds. A context manager.

    One process at a time has the file open: each cuts off what an interruption left at its end. Entering raises
    `ConfigurationError` while another one has it, and for a line that is not an answer.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self.answer_tokens = 0
        """Tokens of all answers to train on."""
        self.finished: set[str] = set()
        """Keys of the answers in the file."""

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = self._path.open("a", encoding="utf-8")
        try:
            hold_alone(file, f"answers {self._path}")
            whole = 0
            for answer, whole in _read(self._path):  # noqa: B007 - the last value counts
                self._count(answer)
            os.truncate(self._path, whole)  # drop a line that an interruption cut off
        except BaseException:
            file.close()
            raise
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, answer: Answer) -> None:
        """Append one answer and flush it to the file."""
        if self._file is None:
            raise ConfigurationError(f"answers {self._path}: needed an open file")
        self._file.write(json.dumps(_row(answer), separators=(",", ":")) + "\n")
        self._file.flush()
        self._count(answer)

    def _count(self, answer: Answer) -> None:
        self.finished.add(answer.key)
        if not answer.held_out:
            self.answer_tokens += len(answer.answer)


def hold_alone(file: IO[Any], where: str) -> None:
    """Keep other processes from calling this for the same file until it is closed, on file systems that have locks.

    Raises `ConfigurationError`, which begins with `where`, while another process holds it.
    """
    with suppress(OSError):  # of a network file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"{where}: another process has it open; needed one at a time") from None


def read_answers(path: Path) -> tuple[Answer, ...]:
    """All answers of a file, in order. Raises `ConfigurationError` for a line that is not an answer."""
    return tuple(answer for answer, _ in _read(path))


def trainable(answers: Sequence[Answer], measured: Iterable[Answer] = ()) -> tuple[Answer, ...]:
    """The answers to train on: none that is empty, held out, or to the prompt of one that is held out or `measured`."""
    unseen = {answer.prompt for answer in (*(one for one in answers if one.held_out), *measured)}
    return tuple(one for one in answers if one.answer and not one.held_out and one.prompt not in unseen)


def _read(path: Path) -> Iterator[tuple[Answer, int]]:
    """Answers, each with the byte position after its line. A last line without a line feed is skipped."""
    position = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                position += len(line)
                yield _parse(path, number, line), position
    except OSError as error:
        raise ConfigurationError(f"answers {path}: needed a readable file; {error}") from None


def _row(answer: Answer) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": answer.key,
        "category": answer.category,
        "temperature": answer.temperature,
        "held_out": answer.held_out,
        "prompt": answer.prompt,
        "answer": answer.answer,
    }
    if answer.leading is not None:
        row["leading_tokens"] = base64.b64encode(answer.leading.tokens.astype("<i4").tobytes()).decode()
        row["leading_log_probabilities"] = base64.b64encode(
            answer.leading.log_probabilities.astype("<f2").tobytes()
        ).decode()
    return row


def _parse(path: Path, number: int, line: bytes) -> Answer:
    try:
        row = json.loads(line)
        answer = tuple(map(int, row["answer"]))
        return Answer(
            str(row["key"]),
            str(row["category"]),
            float(row["temperature"]),
            bool(row["held_out"]),
            tuple(map(int, row["prompt"])),
            answer,
            _leading(row, len(answer)) if answer and "leading_tokens" in row else None,
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigurationError(f"answers {path}, line {number}: needed an answer; {error!r}") from None


def _leading(row: Mapping[str, Any], count: int) -> Leading:
    tokens = np.frombuffer(base64.b64decode(row["leading_tokens"], validate=True), "<i4").reshape(count, -1)
    stored = base64.b64decode(row["leading_log_probabilities"], validate=True)
    return Leading(tokens, np.frombuffer(stored, "<f2").reshape(tokens.shape))
