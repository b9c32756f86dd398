"""`pilotfish distill --kind eagle3`: an EAGLE-3 head for the target of a configuration."""

from __future__ import annotations

from dataclasses import fields

from cluster.core.errors import ConfigurationError
from deploy.distillation.eagle3 import Run, options
from workers.distill.data import ANSWERS
from workers.distill.job import DistillJob

_WRITING, _TRAINING = 0.4, 0.5
"""Shares of the minutes for texts and for training. Hidden states and measuring have the rest."""
_ROWS, _DEPTHS, _VOCABULARY = 64, 5, 8192
_SERVED_PROMPTS, _SERVED_TOKENS = 8, 64
"""Prompts that the served head answers, and most tokens of each answer."""
_OF_OTHER_KINDS = ("field", "layers", "student_config", "start", "int8", "search", "on_policy", "loss", "optimizer")


def distill_eagle3(job: DistillJob) -> None:
    """Train a head as the options of `pilotfish distill` say, and measure it as it is served.

    Of `--minutes`, the target writes texts for two fifths at most. Raises `PilotfishError`.
    """
    given = job.options
    for name in _OF_OTHER_KINDS:
        if getattr(given, name) != next(field.default for field in fields(given) if field.name == name):
            raise ConfigurationError(f"--{name.replace('_', '-')}: refused for kind {given.kind}")
    words = ["--target", str(job.target), "--name", job.name, "--out", str(given.out), "--report-seconds", "20"]
    words += [word for path in given.prompts for word in ("--prompts", str(path))]
    words += ["--answers", str(given.work_directory / ANSWERS), "--evaluate-prompts", str(given.evaluate_prompts)]
    words += ["--max-length", str(given.max_length), "--max-tokens", str(given.max_tokens)]
    words += ["--max-prompt", str(max(1, given.max_length - given.max_tokens)), "--seed", str(given.seed)]
    words += ["--temperatures", ",".join(map(str, given.temperatures)), "--held-out", str(given.held_out)]
    words += ["--learning-rate", str(given.learning_rate), "--batch-tokens", str(given.batch_tokens)]
    words += ["--most-tokens", str(given.answer_tokens), "--rows", str(_ROWS), "--depths", str(given.depths or _DEPTHS)]
    words += ["--vocabulary-size", str(given.vocabulary_size or _VOCABULARY), "--taps", ",".join(map(str, given.taps))]
    seconds = given.answer_minutes * 60
    if given.minutes is not None:
        seconds = min(seconds, given.minutes * 60 * _WRITING)
        words += ["--minutes", str(given.minutes * _TRAINING)]
    words += ["--write-seconds", str(seconds)] + ([] if given.steps is None else ["--steps", str(given.steps)])
    for name, path in (("--evaluate", given.evaluate), ("--notes", given.notes)):
        words += [] if path is None else [name, str(path)]
    if given.device != "auto":
        words += ["--device", given.device]
    texts = Run(options(words), job.notices.print).run()
    for name, answers in texts.measured.items():
        prompts = [one.prompt for one in sorted(answers, key=lambda each: each.key)[:_SERVED_PROMPTS]]
        if prompts:
            found = job.served.draft_with(given.out, "eagle", prompts, _SERVED_TOKENS)
            job.notices.print(f"{given.out}: {found.tokens_per_step:.2f} tokens per step on {name}, as it is served")
