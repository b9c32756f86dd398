"""The stages of distillation: collect the target's answers, train, measure, write. A later run resumes each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from deploy.distillation.data import DistillData, begin_budget, budgeted, collect_answers, draft_vocabulary
from deploy.distillation.options import DistillOptions
from deploy.distillation.seq2seq import is_encoder_decoder, prepare_seq2seq, read_source_files
from deploy.models import resolve_models, served_name
from deploy.progress import ProgressReporter
from deploy.settings import Settings
from deploy.terminal import notices
from workers.distill import card, checkpoints
from workers.distill.agreement import Counts, agreement, share
from workers.distill.answers import Answer
from workers.distill.chart import loss_curve
from workers.distill.export import check_replaceable, export
from workers.distill.loop import TrainingPlan
from workers.distill.prompts import read_prompts
from workers.distill.student import (
    Student,
    StudentPlan,
    check_student,
    load_target,
    make_student,
)
from workers.distill.train import Training
from workers.model.devices import choose_device

CURVE = "training.png"
_MAX_EVALUATED_LENGTH = 4096
"""Maximum length of an evaluated prompt and answer, in tokens. Clients' prompts are longer than training rows."""


def run(settings: Settings, options: DistillOptions, command_line: str) -> None:
    """Make a draft: collect answers, train a student, measure it, write its directory. Raises `PilotfishError`."""
    check_replaceable(options.out)
    training_plan, student_plan = _training_plan(options), _student_plan(options)
    with notices.status("looking for the target") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    configuration = models.configuration
    is_frozen = (options.work_directory / checkpoints.TENSORS).exists()
    has_encoder = is_encoder_decoder(models.target)
    target: PreTrainedModel | None = None
    student: Student
    if has_encoder:
        sources = read_source_files(options)
        budget = begin_budget(options, is_frozen=is_frozen)
        data, student = prepare_seq2seq(models.target, options, student_plan, sources, budget, is_frozen=is_frozen)
    else:
        files = [read_prompts(path) for path in options.prompts]
        check_student(models.target, student_plan, options.vocabulary_size)
        budget = begin_budget(options, is_frozen=is_frozen)
        data = collect_answers(configuration, options, files, budget, is_frozen=is_frozen)
        target = load_target(models.target, choose_device(options.device, 0))
        student = _make_student(target, student_plan, options, data, models.target)
    training_plan = budgeted(training_plan, options.work_directory / checkpoints.TENSORS, budget)
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
        has_encoder=has_encoder,
    )
    export(student, options.out, facts.target, card.write(facts), {} if curve is None else {CURVE: curve})
    notices.print(f"{options.out}: agrees with {facts.target} in {share(held_out):.1%} of held-out positions")


# --- student ----------------------------------------------------------------------------------


def _student_plan(options: DistillOptions) -> StudentPlan:
    if options.start is not None:
        return StudentPlan.of_draft(options.start)
    return StudentPlan(options.layers, options.student_config)


def _make_student(
    target: PreTrainedModel, plan: StudentPlan, options: DistillOptions, data: DistillData, directory: Path
) -> Student:
    if options.vocabulary_size is not None:
        vocabulary = draft_vocabulary(options, data, directory, int(target.config.vocab_size))
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
    student: Student, data: DistillData, plan: TrainingPlan, options: DistillOptions, target: PreTrainedModel | None
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
