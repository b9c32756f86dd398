"""The stages of distillation: collect the target's answers, train, measure, write. A later run resumes each stage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedModel

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.distillation.answers import Quota, answer_all
from deploy.distillation.options import DistillOptions
from deploy.models import resolve_models, served_name
from deploy.progress import ProgressReporter
from deploy.settings import Settings
from deploy.terminal import notices
from workers.distill import card, checkpoints
from workers.distill.agreement import Counts, agreement, share
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.chart import loss_curve
from workers.distill.export import check_replaceable, export
from workers.distill.prompts import Prompt, Task, by_task, read_prompts, schedule
from workers.distill.student import (
    Student,
    StudentPlan,
    check_student,
    frequent_tokens,
    load_target,
    make_student,
    stored_vocabulary,
)
from workers.distill.train import Training, TrainingPlan
from workers.model.loading import choose_device
from workers.model.model_files import end_of_sequence_ids

ANSWERS, EVALUATION, VOCABULARY, CURVE = "answers.jsonl", "evaluation.jsonl", "vocabulary.json", "training.png"
_MIN_SEQUENCES = 32
"""Conversations in flight at once, unless the configuration allows more."""

_MAX_EVALUATED_LENGTH = 4096
"""Maximum length of an evaluated prompt and answer, in tokens. Clients' prompts are longer than training rows."""


@dataclass(frozen=True, slots=True)
class _Data:
    """The target's answers, grouped by their use."""

    train: tuple[Answer, ...]
    held_out: tuple[Answer, ...]
    evaluation: tuple[Answer, ...]
    has_generated_questions: bool
    """Whether the target wrote some of the questions that are trained on."""


def run(settings: Settings, options: DistillOptions, command_line: str) -> None:
    """Make a draft: collect answers, train a student, measure it, write its directory. Raises `PilotfishError`."""
    check_replaceable(options.out)
    training_plan, student_plan = _training_plan(options), _student_plan(options)
    files = [read_prompts(path) for path in options.prompts]
    with notices.status("looking for the target") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    configuration = models.configuration
    check_student(models.target, student_plan, options.vocabulary_size)
    data = _collect_answers(configuration, options, files)
    target = load_target(models.target, choose_device(options.device, 0))
    student = _make_student(target, student_plan, options, data, models.target)
    progress = _train(student, data, training_plan, options, target if training_plan.on_policy else None)
    held_out = _measure(student, data.held_out, options, options.max_length)
    evaluation = _measure(student, data.evaluation, options, _MAX_EVALUATED_LENGTH)
    curve = loss_curve(progress)
    facts = card.Facts(
        target=served_name(configuration),
        target_dtype=configuration.target.dtype,
        command_line=command_line,
        sources=tuple(path.name for path in options.prompts),
        has_generated_questions=data.has_generated_questions,
        answers=data.train,
        layers=student.layers,
        start="" if options.start is None else options.start.name,
        own_parameters=sum(value.numel() for value in student.own_parameters().values()),
        draft_vocabulary_size=len(student.head),
        progress=progress,
        device=torch.cuda.get_device_name() if student.head.is_cuda else f"{torch.get_num_threads()} CPU threads",
        held_out=held_out,
        evaluation=evaluation,
        evaluation_name="" if options.evaluate is None else options.evaluate.name,
        evaluation_prompts=len(data.evaluation),
        curve=CURVE if curve else "",
        notes="" if options.notes is None else options.notes.read_text(encoding="utf-8"),
    )
    export(student, options.out, facts.target, card.write(facts), {} if curve is None else {CURVE: curve})
    notices.print(f"{options.out}: agrees with {facts.target} in {share(held_out):.1%} of held-out positions")


# --- answers ----------------------------------------------------------------------------------


def _collect_answers(configuration: Configuration, options: DistillOptions, files: Sequence[Sequence[Prompt]]) -> _Data:
    """Generate the answers that are missing, and read all of them.

    Once training has a checkpoint, the answers to train on stay as they are.
    """
    evaluation = [] if options.evaluate is None else _evaluation_tasks(options.evaluate, options)
    if not (options.work_directory / checkpoints.TENSORS).exists():
        tasks = schedule(files, options.temperatures, options.held_out, options.seed)
        _generate_answers(configuration, options, ANSWERS, tasks, options.answer_tokens)
    if evaluation:
        _generate_answers(configuration, options, EVALUATION, evaluation, 0)
    answers = read_answers(options.work_directory / ANSWERS)
    keys = {f"{task.key}:0" for task in evaluation}
    evaluated = read_answers(options.work_directory / EVALUATION) if keys else ()
    return _Data(
        train=tuple(answer for answer in answers if not answer.held_out and answer.answer),
        held_out=tuple(answer for answer in answers if answer.held_out and answer.answer),
        evaluation=tuple(answer for answer in evaluated if answer.key in keys),
        has_generated_questions=any(not prompt.turns for prompts in files for prompt in prompts),
    )


def _generate_answers(
    configuration: Configuration, options: DistillOptions, name: str, tasks: Iterable[Task], answer_tokens: int
) -> None:
    """Append the answers to `tasks` to the file `name`, until it holds `answer_tokens` tokens to train on."""
    quota = Quota(answer_tokens, options.answer_minutes * 60, options.max_tokens)
    with (
        AnswerFile(options.work_directory / name) as file,
        ProgressReporter(notices, f"answers for {name}") as reporter,
    ):

        def report(tokens: int) -> None:
            reporter(tokens / answer_tokens if answer_tokens else 0.0, f"{tokens:,} tokens" if answer_tokens else "")

        asyncio.run(answer_all(_with_many_sequences(configuration), tasks, file, quota, report))


def _evaluation_tasks(path: Path, options: DistillOptions) -> list[Task]:
    """The first turns of `evaluate_prompts` prompts of each task."""
    return [
        Task(replace(prompt, turns=prompt.turns[:1]), 0, 0.0, options.seed, held_out=True)
        for prompts in by_task(read_prompts(path)).values()
        for prompt in islice(prompts, options.evaluate_prompts)
    ]


def _with_many_sequences(configuration: Configuration) -> Configuration:
    scheduler = configuration.scheduler
    count = max(_MIN_SEQUENCES, scheduler.max_sequences)
    return configuration.model_copy(update={"scheduler": scheduler.model_copy(update={"max_sequences": count})})


# --- student ----------------------------------------------------------------------------------


def _student_plan(options: DistillOptions) -> StudentPlan:
    if options.start is not None:
        return StudentPlan.of_draft(options.start)
    return StudentPlan(options.layers, options.student_config)


def _make_student(
    target: PreTrainedModel, plan: StudentPlan, options: DistillOptions, data: _Data, directory: Path
) -> Student:
    if options.vocabulary_size is not None:
        answers = (answer.answer for answer in data.train)
        always, size = end_of_sequence_ids(directory), int(target.config.vocab_size)
        path = options.work_directory / VOCABULARY
        vocabulary = stored_vocabulary(
            path, lambda: frequent_tokens(answers, options.vocabulary_size or size, always, size)
        )
        if len(vocabulary) != options.vocabulary_size:
            raise ConfigurationError(
                f"--vocabulary-size: {options.vocabulary_size} is refused; {path} was made with {len(vocabulary)}"
            )
        plan = replace(plan, vocabulary=vocabulary)
    return make_student(target, plan, options.seed)


def _training_plan(options: DistillOptions) -> TrainingPlan:
    return TrainingPlan(
        loss=options.loss,
        on_policy=options.on_policy,
        learning_rate=options.learning_rate,
        batch_tokens=options.batch_tokens,
        max_length=options.max_length,
        seed=options.seed,
        precision="bfloat16" if options.precision == "bfloat16" else "float32",
        steps=options.steps,
        seconds=None if options.minutes is None else options.minutes * 60,
    )


def _train(
    student: Student, data: _Data, plan: TrainingPlan, options: DistillOptions, target: PreTrainedModel | None
) -> checkpoints.Progress:
    training = Training(student, data.train, data.held_out, plan, options.work_directory, target=target)
    with ProgressReporter(notices, "training") as reporter:

        def report(progress: checkpoints.Progress, done: float) -> None:
            loss = f", loss {progress.losses[-1][2]:.3f}" if progress.losses else ""
            agreed = f", agreement {progress.agreements[-1][2]:.1%}" if progress.agreements else ""
            reporter(done, f"epoch {progress.epoch}, step {progress.step}{loss}{agreed}")

        return training.run(report)


def _measure(student: Student, answers: Sequence[Answer], options: DistillOptions, max_length: int) -> Counts:
    return agreement(student, answers, options.batch_tokens, max_length, options.precision == "bfloat16")
