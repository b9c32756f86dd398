"""The model card of a draft that one process trained: what it is, the command, what was told, and the curve."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workers.distill.chart import loss_curve
from workers.distill.checkpoints import Progress
from workers.distill.device_training import State
from workers.distill.modules.module_plan import CURVE
from workers.distill.target_model import device_name

CARD = "README.md"
_TEXTS, _LINES, _CURVES = ("introduction", "method"), "lines", ("losses", "agreements")
"""What a record has: texts, lines with their steps, and points of curves, which begin with theirs."""


@dataclass(slots=True)
class TrainingCard:
    """What the card says so far. Until `introduction` is set, there is no draft."""

    target: str
    """Name of the target."""
    command_line: str
    device: torch.device
    """The device that the training runs on."""
    notes: str
    """Markdown to append."""
    weights: str = ""
    """How the target's weights are stored, in words; empty for plain ones."""
    introduction: str = ""
    """What the draft is."""
    method: str = ""
    """How it learned."""
    lines: list[tuple[int, str]] = field(default_factory=list)
    """What was told of the training, each with the number of steps before it."""
    progress: Progress = field(default_factory=Progress)

    def note(self, line: str) -> None:
        """Add what is told now."""
        self.lines.append((self.progress.step, line))

    def add(self, state: State, tokens_per_step: float) -> None:
        """Add a point to the curve: the tokens per step on texts that are not trained on, infinite without any."""
        self.progress.step = state.step
        self.progress.losses.append((state.step, state.seconds, state.loss))
        if math.isfinite(tokens_per_step):
            self.progress.agreements.append((state.step, state.seconds, tokens_per_step))

    def text(self) -> str:
        """The card, as Markdown."""
        lines = "\n".join(f"    {line}" for _, line in self.lines)
        curve = f"\n![Loss and tokens per step]({CURVE})\n" if self.pictures() else ""
        notes = f"\n{self.notes.strip()}\n" if self.notes.strip() else ""
        weights = f" The target's weights: {self.weights}." if self.weights else ""
        return f"""\
# A draft for {self.target}

{self.introduction}

## How it was made

{self.method}{weights} The device: {device_name(self.device)}.

```
{self.command_line}
```

{lines}
{curve}{notes}"""

    def record(self) -> dict[str, Any]:
        """All that an interrupted training would lose of the card, as JSON values."""
        found = {name: getattr(self, name) for name in _TEXTS}
        return found | {_LINES: self.lines} | {name: getattr(self.progress, name) for name in _CURVES}

    def go_on(self, record: Mapping[str, Any], step: int) -> None:
        """Begin with the record of an earlier run, up to the step from which this one goes on."""
        for name in _TEXTS:
            setattr(self, name, getattr(self, name) or record[name])
        self.lines[:0] = [(before, line) for before, line in record[_LINES] if before <= step]
        self.progress.step = step
        for name in _CURVES:
            getattr(self.progress, name)[:0] = [tuple(point) for point in record[name] if point[0] <= step]

    def pictures(self) -> dict[str, bytes]:
        """The curve by its file name; empty without a point, and where matplotlib is not installed."""
        drawn = loss_curve(self.progress, is_tokens=True) if self.progress.losses else None
        return {} if drawn is None else {CURVE: drawn}

    def rewrite(self, directory: Path) -> None:
        """Write the card and its curve into the directory of a draft that has some."""
        (directory / CARD).write_text(self.text(), encoding="utf-8")
        for name, picture in self.pictures().items():
            (directory / name).write_bytes(picture)


def command_of(module: str, chosen: argparse.Namespace) -> str:
    """The command of a training: that of `pilotfish distill`, or of `python -m deploy.distillation.MODULE`.

    Paths lose their directories.
    """
    if chosen.command_line:
        return str(chosen.command_line)
    given = {f"--{name.replace('_', '-')}": value for name, value in sorted(vars(chosen).items()) if value}
    words = [name if value is True else f"{name} {_word(value)}" for name, value in given.items()]
    return f"python -m deploy.distillation.{module} {' '.join(words)}"


def _word(value: object) -> str:
    if isinstance(value, list):
        return " ".join(map(_word, value))
    return Path(value).name if isinstance(value, (str, Path)) else str(value)
