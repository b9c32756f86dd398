"""The card of a draft that one process trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.distillation import dspark
from deploy.distillation.training_card import TrainingCard, command_of
from workers.distill.device_training import State


def card() -> TrainingCard:
    return TrainingCard("tiny", "pilotfish distill --kind dspark", torch.device("cpu"), "## Licences\n\nApache-2.0.\n")


def test_the_card_of_a_draft_has_its_command_what_was_told_and_its_notes(tmp_path: Path) -> None:
    made = card()
    made.introduction, made.method = "A drafter.", "It learned."
    made.lines += ["[1.0 s] first", "[2.0 s] second"]

    made.rewrite(tmp_path)

    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert text.startswith("# A draft for tiny\n\nA drafter.\n")
    assert f"It learned. The device: {torch.get_num_threads()} CPU threads." in text
    assert "```\npilotfish distill --kind dspark\n```\n\n    [1.0 s] first\n    [2.0 s] second\n" in text
    assert text.endswith("\n## Licences\n\nApache-2.0.\n")
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_a_card_shows_the_curve_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = card()
    made.add(State(10, 60.0, 3.0, None, 0), 1.2)
    made.add(State(20, 120.0, 2.0, None, 1), 1.5)

    made.rewrite(tmp_path)

    assert "![Loss and tokens per step](training.png)" in made.text()
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_the_curve_of_a_loss_below_zero_is_drawn_upwards_and_nothing_for_texts_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss of DSpark is a cross entropy minus what both distributions share."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn: list[tuple[float, float]] = []
    save = figures.Figure.savefig

    def saved(figure: Any, *arguments: Any, **named: Any) -> None:
        drawn.extend(axes.get_ylim() for axes in figure.axes)
        save(figure, *arguments, **named)

    monkeypatch.setattr(figures.Figure, "savefig", saved)
    made = card()
    made.add(State(10, 60.0, -0.1, None, 0), math.inf)
    made.add(State(20, 120.0, -0.3, None, 1), math.inf)

    assert made.pictures()

    ((low, high),) = drawn
    assert low < -0.3 < -0.1 < high


def test_the_command_is_that_of_the_command_line_or_of_the_module_without_directories() -> None:
    chosen = dspark.options(["--target", "/models/tiny", "--prompts", "/data/texts.jsonl", "--out", "/out/draft"])
    own = command_of("dspark", chosen)
    assert own.startswith("python -m deploy.distillation.dspark --") and "/" not in own
    assert "--prompts texts.jsonl" in own and "--command-line" not in own

    chosen.command_line = "pilotfish distill --kind dspark"

    assert command_of("dspark", chosen) == "pilotfish distill --kind dspark"
