"""The stages that make a draft model: collect the target's answers, train, measure, write. A later run resumes each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from workers.distill import card, checkpoints
from workers.distill.agreement import Counts, agreement, share
from workers.distill.answers import Answer
from workers.distill.chart import loss_curve
from workers.distill.data import DistillData, begin_budget, budgeted, collect_answers, draft_vocabulary
from workers.distill.job import DistillJob
from workers.distill.loop import long_steps, training_plan
from workers.distill.options import DistillOptions
from workers.distill.prompts import read_prompts
from workers.distill.seq2seq_data import is_encoder_decoder, prepare_seq2seq, read_source_files
from workers.distill.student import Student, StudentPlan, checked_config, export, make_student
from workers.distill.target_model import device_name, load_target, multiplies_bfloat16
from workers.distill.train import Training
from workers.model.devices import choose_device

CURVE = "training.png"
_MAX_EVALUATED_LENGTH = 4096
"""Maximum length of an evaluated prompt and answer, in tokens. Clients' prompts are longer than training rows."""


def distill_model(job: DistillJob) -> None:
    """Make a draft model: collect answers, train a student, measure, write. Raises `PilotfishError`."""
    options, configuration = job.options, job.configuration
    plan, wanted = training_plan(options), student_plan(options)
    is_frozen = (options.work_directory / checkpoints.TENSORS).exists()
    has_encoder = is_encoder_decoder(job.target)
    target: PreTrainedModel | None = None
    student: Student
    if has_encoder:
        sources = read_source_files(job)
        budget = begin_budget(job, is_frozen=is_frozen)
        data, student = prepare_seq2seq(job, wanted, sources, budget, is_frozen=is_frozen)
    else:
        files = [read_prompts(path) for path in options.prompts]
        checked_config(job.target, wanted, options.vocabulary_size)
        budget = begin_budget(job, is_frozen=is_frozen)
        data = collect_answers(job, files, budget, is_frozen=is_frozen)
        student, target = _make_student(job, wanted, data)
    plan = budgeted(plan, options.work_directory / checkpoints.TENSORS, budget)
    training = Training(student, data.train, data.held_out, plan, options.work_directory, target)
    progress = _train(job, training, budget.left_for_training())
    if note := long_steps(progress, plan):
        job.notices.print(note)
    held_out = _measure(student, data.held_out, options, options.max_length)
    evaluation = _measure(student, data.evaluation, options, _MAX_EVALUATED_LENGTH)
    curve = loss_curve(progress)
    facts = card.Facts(
        target=job.name,
        target_form=card.computed_in(configuration.target),
        command_line=job.command_line,
        has_generated_questions=data.has_generated_questions,
        answers=data.train,
        layers=student.layers,
        start="" if options.start is None else options.start.name,
        own_parameters=sum(value.numel() for value in student.own_parameters().values()),
        draft_vocabulary_size=len(student.head),
        progress=progress,
        device=device_name(student.head.device),
        held_out=held_out,
        evaluation=evaluation,
        evaluation_name="" if options.evaluate is None else options.evaluate.name,
        evaluation_prompts=len(data.evaluation),
        curve=CURVE if curve else "",
        notes="" if options.notes is None else options.notes.read_text(encoding="utf-8"),
        has_encoder=has_encoder,
    )
    export(student, options.out, facts.target, card.write(facts), {} if curve is None else {CURVE: curve})
    job.notices.print(f"{options.out}: agrees with {facts.target} in {share(held_out):.1%} of held-out positions")


def check_options(options: DistillOptions) -> None:
    """Raise `ConfigurationError` for options that no training of a draft model takes."""
    training_plan(options)
    student_plan(options)


# --- student ----------------------------------------------------------------------------------


def student_plan(options: DistillOptions) -> StudentPlan:
    """The settings of the student. Raises `ModelLoadError` for a draft that it cannot start as."""
    if options.start is not None:
        return StudentPlan.of_draft(options.start)
    return StudentPlan(options.layers, options.student_config)


def _make_student(job: DistillJob, plan: StudentPlan, data: DistillData) -> tuple[Student, PreTrainedModel | None]:
    """The student on the device, and the target there if it judges what the student writes.

    Else the target never is on the device: the host's memory has it until the student has its parts.
    """
    options, device = job.options, choose_device(job.options.device, 0)
    # What judges the student's texts has the type of its files, unless the device has no instructions for it.
    dtype: torch.dtype | Literal["auto"] = (
        torch.float32 if options.on_policy and not multiplies_bfloat16(device) else "auto"
    )
    target = load_target(job.target, device if options.on_policy else torch.device("cpu"), dtype)
    if options.vocabulary_size is not None:
        vocabulary = draft_vocabulary(job, options, data, int(target.config.vocab_size))
        plan = replace(plan, vocabulary=vocabulary)
    student = make_student(target, plan, options.seed).to(device)
    return student, target if options.on_policy else None


def _train(job: DistillJob, training: Training, longest: float) -> checkpoints.Progress:
    with job.notices.stage("training", longest) as stage:

        def report(progress: checkpoints.Progress, done: float) -> None:
            loss = f", loss {progress.losses[-1][2]:.3f}" if progress.losses else ""
            agreed = f", agreement {progress.agreements[-1][2]:.1%}" if progress.agreements else ""
            stage(done, f"epoch {progress.epoch}, step {progress.step}{loss}{agreed}")

        return training.run(report)


def _measure(student: Student, answers: Sequence[Answer], options: DistillOptions, max_length: int) -> Counts:
    return agreement(student, answers, options.batch_tokens, max_length, options.precision == "bfloat16")
