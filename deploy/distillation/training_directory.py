"""The directory of one training: a repeated command finds there what it goes on with."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import numpy as np

from deploy.distillation.begun_draft import content_digest
from deploy.distillation.checkpoints import STATE
from workers.distill.answers import Answer, hold_alone
from workers.distill.output import replaced_directory
from workers.model.fingerprint import weights_digest

_TEXTS, _BEST, _FINISHED, _MEASURE = "texts.json", "best", "finished", "tokens_per_step.json"
_CARD, _SAID = "README.md", "card.json"
_WITHOUT_INFLUENCE = (
    *("target", "answers", "states", "write_seconds", "notes", "file_bytes"),
    *("command_line", "quantization", "start"),
)
"""Options that change nothing of a training whose texts, hidden states and weights are known."""


class TrainingDirectory:
    """Has the texts that a training began with, its states, what its card says, and the best draft so far.

    A draft learned the tokens that were frequent in its texts, and its batches are drawn from all of them: with other
    texts, a state would belong to another training.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, chosen: argparse.Namespace, command: str, target: Path, settings: str) -> Self:
        """That of the training by these options, beside their file of answers.

        Another one has other options, weights, or `settings`, those of hidden states and the type of products.
        """
        values = {name: _resolved(value) for name, value in vars(chosen).items() if name not in _WITHOUT_INFLUENCE}
        begun = None if chosen.start is None else content_digest(chosen.start)
        text = json.dumps([command, weights_digest(target), begun, settings, values], default=str, sort_keys=True)
        name = f"{chosen.out.name}-{blake2b(text.encode(), digest_size=8).hexdigest()}"
        return cls(Path(chosen.answers).resolve().parent / name)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other command has this training. Raises `ConfigurationError` while one has it.

        The processes that train for the command do not call it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(f"{self.path.name}.lock").open("ab") as file:
            hold_alone(file, f"training {self.path}")
            yield

    @property
    def is_begun(self) -> bool:
        """Whether there is a state to go on from, or the draft of a training that ended."""
        return self.is_finished or any(self.path.rglob(STATE))

    @property
    def is_finished(self) -> bool:
        """Whether the training ended, and its best draft is here."""
        return (self.path / _FINISHED).exists() and (self.path / _BEST).exists()

    def begin(self, answers: Sequence[Answer], vocabulary: Sequence[int]) -> None:
        """Note the texts of a training that starts anew, and the tokens that its draft can propose."""
        self.clear()
        self.path.mkdir(parents=True)
        record = {"count": len(answers), "digest": _digest(answers), "vocabulary": list(vocabulary)}
        (self.path / _TEXTS).write_text(json.dumps(record), encoding="utf-8")

    def clear(self) -> None:
        """Remove everything."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def known(self, answers: Sequence[Answer]) -> list[Answer] | None:
        """The texts that the training began with: the first ones of a file. `None` if it begins with others."""
        if not (self.path / _TEXTS).exists():
            return None
        record = self._record()
        found = list(answers[: record["count"]])
        return found if _digest(found) == record["digest"] else None

    @property
    def vocabulary(self) -> tuple[int, ...]:
        """The tokens that the draft can propose, ascending; empty for all."""
        return tuple(self._record()["vocabulary"])

    def keep(self, draft: Path, tokens_per_step: float) -> None:
        """Store a copy of a draft as the best one, which was measured with so many tokens per step."""
        with replaced_directory(self.path / _BEST, (draft / _CARD).read_text(encoding="utf-8"), {}) as scratch:
            _copy(draft, scratch)
            (scratch / _MEASURE).write_text(json.dumps(tokens_per_step), encoding="utf-8")

    def best(self) -> float:
        """The measured tokens per step of the best draft; minus infinity without one."""
        file = self.path / _BEST / _MEASURE
        return float(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else -math.inf

    def restore(self, out: Path) -> None:
        """Write the best draft, if there is one, in the place of what `out` has."""
        kept = self.path / _BEST
        if kept.exists():
            with replaced_directory(out, (kept / _CARD).read_text(encoding="utf-8"), {}) as scratch:
                _copy(kept, scratch)
                (scratch / _MEASURE).unlink()

    def note(self, record: Mapping[str, Any]) -> None:
        """Store what the card says so far. Call it before the state of then is stored."""
        scratch = self.path / f"{_SAID}.part"
        scratch.write_text(json.dumps(record), encoding="utf-8")
        scratch.replace(self.path / _SAID)

    def noted(self) -> dict[str, Any] | None:
        """What the card said when the last state was stored, or more; `None` if nothing is known."""
        file = self.path / _SAID
        if not file.exists():
            return None
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def finish(self) -> None:
        """Note that the training ended; a state in the directory itself is of no use any more."""
        (self.path / _FINISHED).touch()
        (self.path / STATE).unlink(missing_ok=True)

    def _record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / _TEXTS).read_text(encoding="utf-8"))
        return found


def _resolved(value: object) -> object:
    if isinstance(value, Path):
        return value.resolve()
    return [_resolved(one) for one in value] if isinstance(value, list) else value


def _copy(source: Path, target: Path) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)


def _digest(answers: Sequence[Answer]) -> str:
    found = blake2b(digest_size=16)
    for one in answers:
        found.update(f"{one.key}\n{one.held_out} {len(one.prompt)} {len(one.answer)}\n".encode())
        found.update(np.asarray((*one.prompt, *one.answer), np.int64).tobytes())
    return found.hexdigest()
