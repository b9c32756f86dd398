"""The card of a draft that one process trained."""

from __future__ import annotations

import json
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
    made.note("[1.0 s] first")
    made.note("[2.0 s] second")

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


def test_a_card_goes_on_with_what_was_noted_before_the_state_of_then() -> None:
    first, second = card(), card()
    first.introduction, first.method = "A drafter.", "It learned."
    first.note("texts")
    for step in (1, 2, 3):
        first.add(State(step, 60.0 * step, 3.0, None, 0), 1.0 + step)
        first.note(f"step {step}")
    second.note("texts again")

    second.go_on(json.loads(json.dumps(first.record())), 2)
    second.note("goes on")
    second.add(State(3, 180.0, 2.5, None, 0), 4.5)
    second.note("another step 3")

    assert [line for _, line in second.lines] == [
        *("texts", "step 1", "step 2", "texts again", "goes on", "another step 3"),
    ]
    assert second.progress.losses == [(1, 60.0, 3.0), (2, 120.0, 3.0), (3, 180.0, 2.5)]
    assert [value for *_, value in second.progress.agreements] == [2.0, 3.0, 4.5]
    assert "A drafter." in second.text() and "It learned." in second.text()


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
