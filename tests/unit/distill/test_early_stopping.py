"""A training is measured as it is served: at intervals, within its share of the time, and the best state is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.chart import loss_curve
from workers.distill.checkpoints import Progress
from workers.distill.loop import EarlyStopping, TrainingLoop, TrainingPlan, long_steps

ANSWERS = tuple(Answer(f"prompts:{row}:0:0", "", 0.0, False, (3, 4), (5, 6)) for row in range(4))


class Line:
    """One parameter, which every step raises; a step takes one second of a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        value = nn.Parameter(torch.zeros(()))
        self.parameters: Mapping[str, nn.Parameter] = {"value": value}
        self.vocabulary, self.identity = torch.zeros(0), ""
        self.optimizers: Sequence[torch.optim.Optimizer] = (torch.optim.SGD([value], lr=1.0),)

    @property
    def value(self) -> float:
        return float(self.parameters["value"].detach())

    def loss(self, answers: Sequence[Answer], number: int) -> tuple[Tensor, int]:
        self.now += 1
        return -self.parameters["value"], 10 * len(answers)

    def measure(self) -> float | None:
        return None


def train(line: Line, tmp_path: Path, rules: EarlyStopping, seconds: float = 1000.0) -> Progress:
    plan = TrainingPlan(seconds=seconds, learning_rate=1.0, batch_tokens=16, checkpoint_seconds=1e9)
    return TrainingLoop(line, ANSWERS, plan, tmp_path / "checkpoint", rules).run(_ignore, lambda: line.now)


def rules_of(
    line: Line, values: Sequence[float], took: float = 1.0, **changes: float
) -> tuple[EarlyStopping, list[float]]:
    """Rules whose measures find `values` in turn (the last one again and again), and the times of the measures."""
    times: list[float] = []

    def measure() -> float | None:
        times.append(line.now)
        line.now += took
        return values[min(len(times), len(values)) - 1]

    return EarlyStopping(measure, **{"patience": 99, **changes}), times  # type: ignore[arg-type]


def test_a_training_is_measured_before_after_and_at_every_tenth_of_its_time(tmp_path: Path) -> None:
    line = Line()
    rules, times = rules_of(line, range(1, 99))

    progress = train(line, tmp_path, rules)

    assert len(times) == 11
    assert all(abs(time - 100 * number) <= 11 for number, time in enumerate(times))
    assert [round(value) for *_, value in progress.served] == list(range(1, 12))
    positions = [entry[2] for entry in progress.served]
    assert positions[0] == 0
    assert positions == sorted(positions)


@pytest.mark.slow
@pytest.mark.parametrize("took", [5.0, 30.0, 90.0])
def test_measures_during_the_training_take_at_most_their_share_of_its_time(tmp_path: Path, took: float) -> None:
    line = Line()
    rules, times = rules_of(line, range(1, 99), took)

    train(line, tmp_path, rules)

    assert took * (len(times) - 1) <= 100  # the last one comes after the training
    assert len(times) == {5.0: 11, 30.0: 4, 90.0: 2}[took]
    assert line.now <= 1001  # the last one is within the time of the plan


def test_a_training_too_short_for_a_measure_has_one_at_its_end(tmp_path: Path) -> None:
    line = Line()
    rules, times = rules_of(line, (2.0,))

    assert len(train(line, tmp_path, rules, seconds=100).served) == len(times) == 1


def test_the_best_state_is_kept(tmp_path: Path) -> None:
    line = Line()
    seen: list[float] = []
    values = iter([1.0, 3.0, 2.0, 2.5, *[1.0] * 9])

    def measure() -> float | None:
        seen.append(line.value)
        return next(values)

    progress = train(line, tmp_path, EarlyStopping(measure, patience=99))

    assert progress.best_served == 3.0
    assert line.value == seen[1] < seen[-1]


def test_a_training_ends_when_measures_in_a_row_bring_nothing(tmp_path: Path) -> None:
    line = Line()
    rules, times = rules_of(line, (1.0, 2.0, 2.0, 1.5, 2.0), patience=3)

    progress = train(line, tmp_path, rules)

    assert len(times) == 5
    assert line.now < 450
    assert progress.best_served == 2.0


def test_a_module_that_cannot_be_served_is_trained_all_the_same(tmp_path: Path) -> None:
    line = Line()

    progress = train(line, tmp_path, EarlyStopping(lambda: None, patience=1))

    assert progress.served == []
    assert line.now >= 1000


def test_a_resumed_training_continues_the_curve_and_knows_the_best_state(tmp_path: Path) -> None:
    first = Line()
    rules, _ = rules_of(first, (1.0, 9.0, 2.0))
    before = train(first, tmp_path, rules, seconds=300)
    second = Line()
    rules, times = rules_of(second, (3.0,))

    progress = train(second, tmp_path, rules, seconds=1000)

    assert progress.served[: len(before.served)] == before.served
    assert len(progress.served) == len(before.served) + len(times)
    assert [entry[1] for entry in progress.served] == sorted(entry[1] for entry in progress.served)
    assert progress.best_served == 9.0
    assert second.value == first.value  # the best state of the first run


def test_the_chart_shows_the_measured_tokens_per_step() -> None:
    pytest.importorskip("matplotlib")
    progress = Progress(losses=[(20, 60.0, 2.0)], agreements=[(20, 60.0, 1.2)])

    estimated = loss_curve(progress, is_tokens=True)
    progress.served = [(0, 0.0, 0, 1.1), (20, 60.0, 900, 1.4)]

    assert loss_curve(progress, is_tokens=True) != estimated


def _ignore(progress: Progress, done: float) -> None:
    pass


def test_a_training_of_which_a_measure_takes_most_still_trains(tmp_path: Path) -> None:
    line = Line()
    rules, times = rules_of(line, [1.0, 2.0], took=600.0)

    progress = train(line, tmp_path, rules)

    assert progress.step >= 100
    assert len(times) == 2
    assert line.value > 0


def test_what_was_measured_with_other_settings_is_forgotten(tmp_path: Path) -> None:
    line = Line()
    train(line, tmp_path, rules_of(line, [9.0, 1.0])[0], seconds=500.0)
    other = EarlyStopping(lambda: 2.0, identity="other", patience=99)

    progress = train(line, tmp_path, other)

    assert progress.best_served == 2.0
    assert [found for *_, found in progress.served] == [2.0] * len(progress.served)


class LongSteps(Line):
    """A training on a clock that each step moves on by `took` seconds."""

    def __init__(self, took: float) -> None:
        super().__init__()
        self._took = took

    def loss(self, answers: Sequence[Answer], number: int) -> tuple[Tensor, int]:
        self.now += self._took - 1
        return super().loss(answers, number)


@pytest.mark.parametrize(("took", "steps"), [(30.0, 3), (45.0, 2), (70.0, 1), (250.0, 1)])
def test_a_step_that_would_end_late_is_not_begun(took: float, steps: int, tmp_path: Path) -> None:
    line = LongSteps(took)
    plan = TrainingPlan(seconds=100.0, learning_rate=1.0, batch_tokens=16)

    progress = TrainingLoop(line, ANSWERS, plan, tmp_path / "checkpoint").run(_ignore, lambda: line.now)

    assert progress.step == steps  # how long the first one takes is not known before it
    told = long_steps(progress, plan)
    when = "before" if took < 100 else "after"
    assert f"{abs(100 - took * steps):.1f} s {when} its time, after {steps} steps: one takes up to {took:.1f} s" in told


def test_a_resumed_training_knows_how_long_a_step_takes(tmp_path: Path) -> None:
    def steps(seconds: float) -> int:
        line = LongSteps(70.0)
        plan = TrainingPlan(seconds=seconds, learning_rate=1.0, batch_tokens=16)
        return TrainingLoop(line, ANSWERS, plan, tmp_path / "checkpoint").run(_ignore, lambda: line.now).step

    assert steps(100.0) == 1
    assert steps(130.0) == 1  # 60 s more are too few for a step
    assert steps(145.0) == 2


def test_steps_that_are_short_beside_the_time_are_not_spoken_of(tmp_path: Path) -> None:
    line = Line()
    plan = TrainingPlan(seconds=100.0, learning_rate=1.0, batch_tokens=16)

    progress = TrainingLoop(line, ANSWERS, plan, tmp_path / "checkpoint").run(_ignore, lambda: line.now)

    assert (progress.step, long_steps(progress, plan)) == (100, "")


class Diverging(Line):
    """A training whose loss is not a number from step 3 on."""

    def loss(self, answers: Sequence[Answer], number: int) -> tuple[Tensor, int]:
        loss, count = super().loss(answers, number)
        return loss * (float("nan") if number >= 3 else 1.0), count


@pytest.mark.parametrize(("pause", "kept"), [(0.0, 3), (1e9, 2)], ids=["a checkpoint a step", "one at the end"])
def test_a_training_that_diverges_ends_with_an_error_and_its_last_checkpoint_stays(
    pause: float, kept: int, tmp_path: Path
) -> None:
    """Else a draft would be written whose parameters are not numbers, and every later run would go on from them."""
    file = tmp_path / "checkpoint"
    plan = TrainingPlan(steps=2, learning_rate=1.0, batch_tokens=16)
    TrainingLoop(Line(), ANSWERS, plan, file).run(_ignore)

    with pytest.raises(ConfigurationError, match=r"--learning-rate: 1 is refused; it must be lower: at step \d"):
        TrainingLoop(Diverging(), ANSWERS, replace(plan, steps=6, checkpoint_seconds=pause), file).run(_ignore)

    reached = TrainingLoop(Line(), ANSWERS, replace(plan, steps=kept), file).run(_ignore)
    assert reached.step == kept and load_file(file)["student.value"].isfinite()
