"""A draft's making, stage by stage: ask, train, measure, write. Each stage goes on from what an earlier run left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel

from cluster.core.config import Configuration
from cluster.core.errors import ConfigurationError
from deploy.commands.distill import DistillOptions
from deploy.distillation.answers import Quota, answer_all
from deploy.models import resolve_models, served_name
from deploy.progress import ProgressReporter
from deploy.settings import Settings
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
    keep_vocabulary,
    load_target,
    make_student,
)
from workers.distill.train import Training, TrainingPlan
from workers.model.loading import choose_device
from workers.model.model_files import end_of_sequence_ids

ANSWERS, EVALUATION, VOCABULARY, CURVE = "answers.jsonl", "evaluation.jsonl", "vocabulary.json", "training.png"
_SEQUENCES = 32
"""Conversations held at once, unless the configuration allows more."""

_LONGEST_EVALUATED = 4096
"""Tokens of prompt and answer: beyond what was trained on, since clients' prompts are as well."""

notices = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Data:
    """What was asked and answered."""

    train: tuple[Answer, ...]
    held_out: tuple[Answer, ...]
    evaluation: tuple[Answer, ...]
    asks_itself: bool
    """Whether the target wrote some of the questions to train on."""


def run(settings: Settings, options: DistillOptions, command: str) -> None:
    """Make the draft that was asked for. Raises `PilotfishError`."""
    check_replaceable(options.out)
    plan = _plan(options)
    files = [read_prompts(path) for path in options.prompts]
    with notices.status("looking") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    configuration = models.configuration
    student_plan = _student_plan(options)
    check_student(models.target, student_plan, options.vocabulary_size)
    data = _answers(configuration, options, files)
    target = load_target(models.target, choose_device(options.device, 0))
    student = _student(target, student_plan, options, data, models.target)
    progress = _train(student, data, plan, options, target if plan.on_policy else None)
    counts = {
        name: agreement(student, answers, options.batch_tokens, length, options.precision == "bfloat16")
        for name, answers, length in (
            ("held out", data.held_out, options.max_length),
            ("evaluation", data.evaluation, _LONGEST_EVALUATED),
        )
    }
    curve = loss_curve(progress)
    facts = replace(
        _facts(configuration, options, command, student, data, progress, counts), curve=CURVE if curve else ""
    )
    export(student, options.out, facts.target, card.write(facts), {} if curve is None else {CURVE: curve})
    notices.print(f"{options.out}: agrees with {facts.target} in {share(counts['held out']):.1%} of held-out positions")


def _answers(configuration: Configuration, options: DistillOptions, files: Sequence[Sequence[Prompt]]) -> _Data:
    """Ask what is not answered yet. Once training has begun, what there is stays as it is."""
    wanted: list[tuple[str, Iterable[Task], int]] = []
    evaluation = [] if options.evaluate is None else _evaluation_tasks(options.evaluate, options)
    if not (options.work / checkpoints.TENSORS).exists():
        order = schedule(files, options.temperatures, options.held_out, options.seed)
        wanted.append((ANSWERS, order, options.answer_tokens))
    if evaluation:
        wanted.append((EVALUATION, evaluation, 0))
    for name, tasks, tokens in wanted:
        with AnswerFile(options.work / name) as file, ProgressReporter(notices, name) as watched:
            quota = Quota(tokens, options.answer_minutes * 60, options.max_tokens)
            hear = partial(_tell_tokens, watched, tokens)
            asyncio.run(answer_all(_for_many(configuration), tasks, file, quota, hear))
    answers = read_answers(options.work / ANSWERS)
    keys = {f"{task.key}:0" for task in evaluation}
    return _Data(
        tuple(answer for answer in answers if not answer.held_out and answer.answer),
        tuple(answer for answer in answers if answer.held_out and answer.answer),
        tuple(answer for answer in read_answers(options.work / EVALUATION) if answer.key in keys) if keys else (),
        any(not prompt.turns for prompts in files for prompt in prompts),
    )


def _evaluation_tasks(path: Path, options: DistillOptions) -> list[Task]:
    """The first turns of as many prompts of each task as were asked for."""
    return [
        Task(replace(prompt, turns=prompt.turns[:1]), 0, 0.0, options.seed, held_out=True)
        for prompts in by_task(read_prompts(path)).values()
        for prompt in islice(prompts, options.evaluate_prompts)
    ]


def _for_many(configuration: Configuration) -> Configuration:
    scheduler = configuration.scheduler
    many = max(_SEQUENCES, scheduler.max_sequences)
    return configuration.model_copy(update={"scheduler": scheduler.model_copy(update={"max_sequences": many})})


def _student(
    target: PreTrainedModel, plan: StudentPlan, options: DistillOptions, data: _Data, directory: Path
) -> Student:
    if options.vocabulary_size is not None:
        answers = (answer.answer for answer in data.train)
        always, size = end_of_sequence_ids(directory), int(target.config.vocab_size)
        vocabulary = keep_vocabulary(
            options.work / VOCABULARY, lambda: frequent_tokens(answers, options.vocabulary_size or size, always, size)
        )
        if len(vocabulary) != options.vocabulary_size:
            raise ConfigurationError(
                f"--vocabulary-size: {options.vocabulary_size} is refused; "
                f"{options.work / VOCABULARY} was made with {len(vocabulary)}"
            )
        plan = replace(plan, vocabulary=vocabulary)
    return make_student(target, plan, options.seed)


def _student_plan(options: DistillOptions) -> StudentPlan:
    if options.start is not None:
        return StudentPlan.of_draft(options.start)
    return StudentPlan(options.layers, options.student_config)


def _plan(options: DistillOptions) -> TrainingPlan:
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
    training = Training(student, data.train, data.held_out, plan, options.work, target=target)
    with ProgressReporter(notices, "training") as watched:

        def report(progress: checkpoints.Progress, done: float) -> None:
            loss = f", loss {progress.losses[-1][2]:.3f}" if progress.losses else ""
            agreed = f", agreement {progress.agreements[-1][2]:.1%}" if progress.agreements else ""
            watched(done, f"epoch {progress.epoch}, step {progress.step}{loss}{agreed}")

        return training.run(report)


def _facts(
    configuration: Configuration,
    options: DistillOptions,
    command: str,
    student: Student,
    data: _Data,
    progress: checkpoints.Progress,
    counts: dict[str, Counts],
) -> card.Facts:
    return card.Facts(
        target=served_name(configuration),
        target_dtype=configuration.target.dtype,
        command=command,
        sources=tuple(path.name for path in options.prompts),
        asks_itself=data.asks_itself,
        answers=data.train,
        layers=student.layers,
        start="" if options.start is None else options.start.name,
        own_parameters=sum(value.numel() for value in student.own_parameters().values()),
        guessable=len(student.head),
        progress=progress,
        device=torch.cuda.get_device_name() if student.head.is_cuda else f"{torch.get_num_threads()} CPU threads",
        held_out=counts["held out"],
        evaluation=counts["evaluation"],
        evaluation_name=options.evaluate.name if options.evaluate is not None else "",
        curve=CURVE,
        notes=options.notes.read_text(encoding="utf-8") if options.notes is not None else "",
    )


def _tell_tokens(watched: ProgressReporter, wanted: int, tokens: int) -> None:
    watched(tokens / wanted if wanted else 0.0, f"{tokens:,} tokens" if wanted else "asking")
