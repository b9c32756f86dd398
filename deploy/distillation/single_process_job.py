"""`pilotfish distill` with a kind that is trained in one process: EAGLE-3 or DSpark for a configuration's target."""

from __future__ import annotations

import gc

import torch

from cluster.core.errors import ConfigurationError, PilotfishError
from deploy.dataclass_options import flag
from deploy.distillation import dspark, eagle3
from deploy.distillation.execute import execute
from deploy.distillation.rank_writer import RankWriter
from deploy.distillation.served_texts import Server
from workers.distill.data import ANSWERS
from workers.distill.job import DistillJob
from workers.distill.options import DSPARK, DistillOptions
from workers.distill.seq2seq_data import is_encoder_decoder
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import MaskedBlockShape

_WRITING, _TRAINING = 0.4, 0.5
"""Shares of the minutes for texts and for training. Hidden states and measuring have the rest."""
_DEPTHS, _SLOTS, _VOCABULARY = 5, 6, 8192
_ROUNDS = 8
"""Conversations of a batch that a cluster writes, for each of its sequences: the next one begins when one ends."""
_SERVED_PROMPTS, _SERVED_TOKENS = 8, 64
"""Prompts that the served draft answers, and most tokens of each answer."""


def distill_in_one_process(job: DistillJob, server: Server | None = None) -> None:
    """Train a draft as the options of `pilotfish distill` say, and measure it as it is served.

    Of `--minutes`, the target writes texts for two fifths at most: `target.tensor_parallel` ranks of the serving engine
    write them, or a `server` does, and compute their hidden states. Raises `PilotfishError`.
    """
    given = job.options
    is_block = given.kind == DSPARK
    for name in ("vocabulary_size", "taps", *(("layers", "depths") if is_block else ())):
        if given.start is not None and getattr(given, name):
            raise ConfigurationError(f"{flag(name)}: refused with --start, whose draft has its own")
    if given.max_tokens >= given.max_length:
        raise ConfigurationError(
            f"--max-tokens: {given.max_tokens} is refused; it must be below --max-length, {given.max_length}, of which "
            f"the prompt is a part"
        )
    if is_encoder_decoder(job.target):
        raise ConfigurationError(
            f"--kind: {given.kind} is refused for a target with an encoder; it must be layers, heads or table"
        )
    words = [*_common(job), *(block_words(given) if is_block else head_words(given))]
    told = job.notices.print
    make = dspark if is_block else eagle3
    chosen = make.options(words)
    chosen.command_line, chosen.quantization = job.command_line, job.configuration.target.quantization
    with RankWriter(job.configuration, told, given.max_length, server) as writer:
        chosen.rows = _ROUNDS * writer.sequences
        texts = execute(make.Run, chosen, told, writer)
    gc.collect()  # whoever serves the draft needs the memory of the training
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for name, answers in texts.measured.items():
        prompts = [one.prompt for one in sorted(answers, key=lambda each: each.key)[:_SERVED_PROMPTS]]
        try:
            found = job.served.draft_with(given.out, "block" if is_block else "eagle", prompts, _SERVED_TOKENS)
        except (PilotfishError, OSError, torch.OutOfMemoryError) as error:
            job.notices.print(f"{given.out}: tokens per step on {name} were not measured: {error}")
            continue
        # Whole answers, which the training measures, have more: they repeat themselves towards their end.
        job.notices.print(
            f"{given.out}: {found.tokens_per_step:.2f} tokens per step on {name}, as it is served, in the first "
            f"{_SERVED_TOKENS} tokens of {len(prompts)} answers; steps that read a prompt are counted"
        )


def _common(job: DistillJob) -> list[str]:
    given = job.options
    words = ["--target", str(job.target), "--name", job.name, "--out", str(given.out), "--report-seconds", "20"]
    words += [word for path in given.prompts for word in ("--prompts", str(path))]
    words += ["--answers", str(given.work_directory / ANSWERS), "--evaluate-prompts", str(given.evaluate_prompts)]
    words += ["--max-length", str(given.max_length), "--max-tokens", str(given.max_tokens)]
    words += ["--max-prompt", str(max(1, given.max_length - given.max_tokens)), "--seed", str(given.seed)]
    words += ["--temperatures", ",".join(map(str, given.temperatures)), "--held-out", str(given.held_out)]
    words += ["--learning-rate", str(given.learning_rate), "--taps", ",".join(map(str, given.taps))]
    words += ["--most-tokens", str(given.answer_tokens)]
    seconds = given.answer_minutes * 60
    if given.minutes is not None:
        seconds = min(seconds, given.minutes * 60 * _WRITING)
        words += ["--minutes", str(given.minutes * _TRAINING)]
    words += ["--write-seconds", str(seconds)] + ([] if given.steps is None else ["--steps", str(given.steps)])
    words += ["--workers", str(given.workers)] + (["--recompute"] if given.recompute else [])
    for name, path in (("--evaluate", given.evaluate), ("--notes", given.notes), ("--start", given.start)):
        words += [] if path is None else [name, str(path)]
    return words + ([] if given.device == "auto" else ["--device", given.device])


def head_words(given: DistillOptions) -> list[str]:
    """The options of an EAGLE-3 head."""
    words = ["--batch-tokens", str(given.batch_tokens), "--depths", str(given.depths or _DEPTHS)]
    words += ["--pack"] if given.pack else []
    words += ["--vocabulary-size", str(given.vocabulary_size or _VOCABULARY), "--loss", given.loss]
    return words + _overlap(given)


def _overlap(given: DistillOptions) -> list[str]:
    return [] if given.overlap_weight is None else ["--overlap", str(given.overlap_weight)]


def block_words(given: DistillOptions) -> list[str]:
    """The options of a DSpark drafter.

    `--batch-tokens` counts the slots of a batch, a quarter of whose positions are in blocks.
    """
    slots = _slots(given)
    blocks = max(1, given.max_length // 8)
    rows = max(1, given.batch_tokens // (blocks * slots))
    words = ["--slots", str(slots), "--blocks", str(blocks), "--batch-rows", str(rows)]
    if given.vocabulary_size is not None:
        words += ["--vocabulary-size", str(given.vocabulary_size)]
    if given.layers:
        words += ["--layers", str(len(given.layers)), "--start-layers", ",".join(map(str, given.layers))]
    return words + _overlap(given)


def _slots(given: DistillOptions) -> int:
    """Tokens of a block: those of the draft that is trained further, if there is one. Raises `ModelLoadError`."""
    shape = None if given.start is None else read_draft(given.start).shape
    return shape.slots if isinstance(shape, MaskedBlockShape) else given.depths or _SLOTS
