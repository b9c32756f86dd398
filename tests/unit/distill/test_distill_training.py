"""Training reduces the loss, resumes exactly after an interruption, and follows its plan."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from cluster.core.errors import ConfigurationError
from tests.support.models import tiny
from workers.distill.agreement import agreement, share
from workers.distill.answers import Answer, Leading
from workers.distill.chart import loss_curve
from workers.distill.checkpoints import Progress
from workers.distill.descent import learning_rate
from workers.distill.examples import batches_of_epoch, make_batch
from workers.distill.loop import TrainingPlan
from workers.distill.student import Student, StudentPlan, make_student
from workers.distill.target_model import load_target
from workers.distill.train import Training, on_policy

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LENGTH = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    config = tiny.llama(num_hidden_layers=3, tie_word_embeddings=True)
    return load_target(tiny.save(tmp_path_factory.mktemp("target"), config), CPU)


@pytest.fixture(scope="module")
def answers(target: PreTrainedModel) -> tuple[Answer, ...]:
    """Greedy answers of the tiny target, with its eight most probable tokens at each position."""
    prompts = torch.randint(3, tiny.VOCABULARY, (24, 5), generator=torch.Generator().manual_seed(0))
    tokens = prompts
    with torch.inference_mode():
        for _ in range(LENGTH):
            tokens = torch.cat([tokens, target(input_ids=tokens).logits[:, -1:].argmax(-1)], dim=1)
        thoughts = target(input_ids=tokens).logits[:, 4:-1].log_softmax(-1).topk(8)
    return tuple(
        Answer(
            f"prompts:{row}:0:0:0",
            "even" if row % 2 == 0 else "odd",
            0.0,
            row >= 18,
            tuple(prompts[row].tolist()),
            tuple(tokens[row, 5:].tolist()),
            Leading(thoughts.indices[row].numpy().astype(np.int32), thoughts.values[row].numpy().astype(np.float16)),
        )
        for row in range(24)
    )


def student_of(target: PreTrainedModel, vocabulary: tuple[int, ...] | None = None) -> Student:
    return make_student(target, StudentPlan((0, 2), vocabulary=vocabulary), seed=0)


def plan(**changes: object) -> TrainingPlan:
    values: dict[str, object] = {"steps": 30, "batch_tokens": 102, "precision": "float32", "learning_rate": 5e-3}
    return TrainingPlan(**(values | changes))  # type: ignore[arg-type]


def train(
    target: PreTrainedModel,
    answers: Sequence[Answer],
    work: Path,
    training_plan: TrainingPlan,
    student: Student | None = None,
) -> tuple[Student, Progress]:
    student = student or student_of(target)
    teacher = target if training_plan.on_policy else None
    training = Training(student, answers[:18], answers[18:], training_plan, work, target=teacher)
    return student, training.run(lambda progress, done: None)


class TestBatches:
    def test_the_loss_covers_exactly_the_tokens_of_answers(self) -> None:
        short = Answer("a", "", 0.0, False, (11, 12, 13), (14, 15))
        longer = Answer("b", "", 0.0, False, (21, 22), (23, 24, 25, 26))

        batch = make_batch([short, longer], max_length=32)

        assert batch.tokens.tolist() == [[11, 12, 13, 14, 15, 0], [21, 22, 23, 24, 25, 26]]
        assert batch.tokens.flatten()[batch.selected].tolist() == [13, 14, 22, 23, 24, 25]
        assert batch.labels.tolist() == [14, 15, 23, 24, 25, 26]
        assert batch.leading_tokens[:, 0].tolist() == batch.labels.tolist()  # the written token has all the mass

    def test_long_answers_are_truncated_at_the_end(self) -> None:
        batch = make_batch(
            [Answer("a", "", 0.0, False, (11, 12), (13, 14, 15)), Answer("b", "", 0.0, False, (1,) * 9, (2,))], 4
        )

        assert batch.tokens.tolist() == [[11, 12, 13, 14], [1, 1, 1, 1]]
        assert batch.labels.tolist() == [13, 14]

    def test_an_epoch_has_every_answer_once_in_a_new_order(self, answers: Sequence[Answer]) -> None:
        first, again, second = (batches_of_epoch(answers, epoch, 7, 60, 512) for epoch in (0, 0, 1))

        assert first == again != second
        assert sorted(index for batch in first for index in batch) == list(range(len(answers)))

    def test_a_batch_respects_its_token_limit_with_padding_and_is_never_empty(self) -> None:
        ragged = [Answer(str(size), "", 0.0, False, (1,), (2,) * size) for size in (1, 3, 5, 9, 80)]

        for batch in batches_of_epoch(ragged, 0, 0, 20, 512):
            widest = max(len(ragged[index].answer) + 1 for index in batch)
            assert len(batch) == 1 or len(batch) * widest <= 20


class TestTraining:
    def test_the_loss_falls_and_agreement_rises(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        before = share(agreement(student_of(target), answers[:18], 512, 64, autocast=False))

        student, progress = train(target, answers, tmp_path, plan(steps=60))

        after = share(agreement(student, answers[:18], 512, 64, autocast=False))
        assert progress.losses[-1][2] < 0.5 * progress.losses[0][2]
        assert after > before + 0.2

    def test_an_interruption_changes_no_weight(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        whole, _ = train(target, answers, tmp_path / "whole", plan())
        student = student_of(target)
        interrupted = Training(student, answers[:18], (), plan(checkpoint_seconds=0), tmp_path / "parts")

        with pytest.raises(KeyboardInterrupt):
            interrupted.run(lambda progress, done: _stop_at(progress, 13))
        resumed, progress = train(target, answers, tmp_path / "parts", plan())

        assert progress.step == 30
        for name, value in whole.own_parameters().items():
            assert torch.equal(value, resumed.own_parameters()[name]), name

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_writes_a_checkpoint_after_the_step_that_runs(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path, number: signal.Signals
    ) -> None:
        whole, _ = train(target, answers, tmp_path / "whole", plan())
        before, steps = signal.getsignal(number), list[int]()

        def interrupt(progress: Progress, done: float) -> None:
            steps.append(progress.step)
            if progress.step == 13:
                signal.raise_signal(number)

        with pytest.raises(KeyboardInterrupt):  # long before the next checkpoint of the plan
            Training(student_of(target), answers[:18], (), plan(checkpoint_seconds=9999), tmp_path / "parts").run(
                interrupt
            )
        assert steps[-1] == 13
        assert signal.getsignal(number) == before

        resumed, progress = train(target, answers, tmp_path / "parts", plan())
        assert progress.step == 30
        for name, value in whole.own_parameters().items():
            assert torch.equal(value, resumed.own_parameters()[name]), name

    def test_a_finished_training_is_not_repeated(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        student, done = train(target, answers, tmp_path, plan(steps=3))

        again, progress = train(target, answers, tmp_path, plan(steps=3))

        assert progress == done
        for name, value in student.own_parameters().items():
            assert torch.equal(value, again.own_parameters()[name])

    def test_a_checkpoint_of_other_settings_is_refused(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        train(target, answers, tmp_path, plan(steps=2))

        with pytest.raises(ConfigurationError, match=r"checkpoint .*other settings"):
            train(target, answers, tmp_path, plan(steps=2, learning_rate=1e-4))

    @pytest.mark.parametrize("layers", [(0, 1), (0, 2)])
    def test_a_checkpoint_of_another_student_is_refused(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path, layers: tuple[int, ...]
    ) -> None:
        """The student has other layers of the same shapes, or a different vocabulary of the same size."""
        train(target, answers, tmp_path, plan(steps=2), student_of(target, (2, 3, 4)))
        other = make_student(target, StudentPlan(layers, vocabulary=(2, 3, 5) if layers == (0, 2) else (2, 3, 4)), 0)

        with pytest.raises(ConfigurationError, match=r"checkpoint .*other settings"):
            train(target, answers, tmp_path, plan(steps=2), other)

    def test_only_the_students_own_weights_change(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        fresh = student_of(target)

        student, _ = train(target, answers, tmp_path, plan(steps=2))

        assert torch.equal(student.head, fresh.head)
        embeddings = (each.module.get_input_embeddings().weight for each in (student, fresh))
        assert torch.equal(*embeddings)

    def test_a_reduced_vocabulary_learns_the_tokens_that_it_can_propose(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        student = student_of(target, tuple(range(0, tiny.VOCABULARY, 2)))

        _, progress = train(target, answers, tmp_path, plan(steps=60), student)

        assert progress.losses[-1][2] < 0.7 * progress.losses[0][2]

    @pytest.mark.parametrize("changes", [{"loss": "reverse_kl"}, {"on_policy": 0.5}, {"precision": "bfloat16"}])
    def test_every_variant_learns(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path, changes: dict[str, object]
    ) -> None:
        _, progress = train(target, answers, tmp_path, plan(steps=40, **changes))

        assert progress.losses[-1][2] < progress.losses[0][2]

    def test_training_ends_with_its_time_and_resumes_from_the_time_spent(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        def run(seconds: float) -> Progress:
            ticks = count()
            training_plan = plan(steps=None, seconds=seconds, checkpoint_seconds=1e9)
            training = Training(student_of(target), answers[:18], (), training_plan, tmp_path)
            return training.run(lambda progress, done: None, lambda: float(next(ticks)))

        assert run(5.0).step == 5
        assert run(8.0).step == 8

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"steps": None}, "a number of steps or of minutes, and not both"),
            ({"seconds": 1.0}, "a number of steps or of minutes, and not both"),
            ({"loss": "hinge"}, "loss: 'hinge' is unknown"),
            ({"on_policy": 1.5}, "on_policy: 1.5 is refused; it must be within 0 and 1"),
        ],
    )
    def test_an_invalid_plan_is_refused(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            plan(**changes)

    def test_training_without_answers_is_refused(self, target: PreTrainedModel, tmp_path: Path) -> None:
        too_long = Answer("a", "", 0.0, False, (1,) * 512, (2, 3))
        for answers in ((), (too_long,)):
            with pytest.raises(ConfigurationError, match=r"needed an answer within max_length \(512\), found none"):
                Training(student_of(target), answers, (), plan(), tmp_path)

    def test_on_policy_training_requires_the_target(
        self, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigurationError, match="on_policy: needed the target, for"):
            Training(student_of(target), answers, (), plan(on_policy=1.0), tmp_path)


def test_on_policy_training_continues_the_prompts_and_uses_the_full_distribution_of_the_target(
    target: PreTrainedModel, answers: tuple[Answer, ...]
) -> None:
    student = student_of(target)

    batch, again, other = (on_policy(student, target, answers[:3], 64, seed) for seed in (1, 1, 2))

    assert torch.equal(batch.tokens, again.tokens)
    assert not torch.equal(batch.tokens, other.tokens)
    assert batch.tokens[:, :5].tolist() == [list(answer.prompt) for answer in answers[:3]]
    assert torch.equal(batch.tokens.flatten()[batch.selected + 1], batch.labels)
    assert batch.leading_tokens.shape == (3 * LENGTH, tiny.VOCABULARY)
    with torch.inference_mode():
        expected = target(input_ids=batch.tokens).logits.flatten(0, 1)[batch.selected].log_softmax(-1)
    torch.testing.assert_close(batch.leading_log_probabilities, expected)


def test_agreement_is_counted_by_category(target: PreTrainedModel, answers: tuple[Answer, ...]) -> None:
    everything = make_student(target, StudentPlan((0, 1, 2)), 0)

    counts = agreement(everything, answers, 512, 64, autocast=False)

    assert counts == {"even": (12 * LENGTH, 12 * LENGTH), "odd": (12 * LENGTH, 12 * LENGTH)}
    assert share(counts) == 1.0
    assert share({}) == 0.0


def test_the_learning_rate_rises_and_then_falls_to_zero() -> None:
    rates = [learning_rate(1.0, 0.1, done / 100) for done in range(101)]

    assert rates[:11] == sorted(rates[:11])
    assert rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.0)


def test_the_training_curve_is_written_as_a_png() -> None:
    progress = Progress(losses=[(20, 1.0, 3.0), (40, 2.0, 2.0)], agreements=[(40, 2.0, 0.4)])

    picture = loss_curve(progress)

    assert picture is not None
    assert picture.startswith(b"\x89PNG")


def test_the_axes_of_the_training_curve_are_named_and_begin_where_its_data_are(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    drawn: list[Any] = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    progress = Progress(losses=[(20, 60.0, 3.0), (40, 120.0, 2.0)], agreements=[(40, 120.0, 0.40), (60, 180.0, 0.44)])

    loss_curve(progress)

    loss, quality = drawn[0].axes
    assert (loss.get_xlabel(), loss.get_ylabel()) == ("minutes of training", "divergence (nats per token)")
    assert quality.get_ylabel() == "agreement on held-out answers (%)"
    assert 1.8 < loss.get_ylim()[0] < 2.0 and 39 < quality.get_ylim()[0] < 40
    assert loss.get_lines()[0].get_color() != quality.get_lines()[0].get_color()


def _stop_at(progress: Progress, step: int) -> None:
    if progress.step == step:
        raise KeyboardInterrupt
