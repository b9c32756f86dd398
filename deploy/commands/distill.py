"""`pilotfish distill`: what can be asked for. Torch comes with the work itself, once the options are checked."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.core.errors import ConfigurationError
from deploy.commands.options import ConfigOption, SetOption
from deploy.settings import Settings, load_settings


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """One draft's making, from prompts to its directory. `distill` says what each option means.

    Raises `ConfigurationError` for a value out of bounds and for files that are not there.
    """

    prompts: tuple[Path, ...]
    out: Path
    work: Path
    evaluate: Path | None = None
    evaluate_prompts: int = 8
    held_out: int = 48
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    answer_tokens: int = 1_000_000
    answer_minutes: float = 30.0
    max_tokens: int = 384
    layers: tuple[int, ...] = ()
    student_config: Path | None = None
    start: Path | None = None
    vocabulary_size: int | None = None
    loss: str = "forward_kl"
    on_policy: float = 0.0
    minutes: float | None = None
    steps: int | None = None
    learning_rate: float = 1e-3
    batch_tokens: int = 4096
    max_length: int = 512
    precision: str = "bfloat16"
    device: str = "auto"
    seed: int = 0
    notes: Path | None = None

    def __post_init__(self) -> None:
        positive = ("answer_tokens", "answer_minutes", "max_tokens", "learning_rate", "batch_tokens", "max_length")
        for name in (*positive, "evaluate_prompts", "minutes", "steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{_option(name)}: {value} is refused; it must be above 0")
        if self.held_out < 0:
            raise ConfigurationError(f"--held-out: {self.held_out} is refused; it must be 0 or above")
        if not self.prompts:
            raise ConfigurationError("--prompts: needed at least one file, found none")
        if (self.minutes is None) == (self.steps is None):
            raise ConfigurationError("--minutes and --steps: needed one of them")
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigurationError(f"--precision: {self.precision!r} is refused; it must be float32 or bfloat16")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigurationError(f"--device: {self.device!r} is refused; it must be auto, cpu or cuda")
        if self.work.resolve().is_relative_to(self.out.resolve()):
            raise ConfigurationError(f"--work: {self.work} is refused; it must not be inside --out, {self.out}")
        if len({file.name for file in self.prompts}) < len(self.prompts):
            raise ConfigurationError(
                "--prompts: files of the same name are refused; answers are kept under their names"
            )
        if self.start is not None and (self.layers or self.student_config is not None):
            raise ConfigurationError("--start: a draft has its layers; needed without --layers and --student-config")
        self._check_files()

    def _check_files(self) -> None:
        single = ("evaluate", "student_config", "start", "notes")
        given = [("prompts", file) for file in self.prompts] + [(name, getattr(self, name)) for name in single]
        for name, file in given:
            if file is not None and not file.exists():
                raise ConfigurationError(f"{_option(name)} {file}: no such file")

    def command(self, config: str | None, assignments: tuple[str, ...]) -> str:
        """The command line that asks for this, every path without its directories."""
        words = ["pilotfish distill"]
        if config is not None:
            words.append(f"--config {Path(config).name}")
        words += [f"--set {_without_directories(assignment)}" for assignment in assignments]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name == "work":
                continue
            for part in value if field.name == "prompts" else (value,):
                words.append(f"{_option(field.name)} {_written(part)}")
        return " \\\n    ".join(words)


def distill(
    prompts: Annotated[
        list[Path],
        typer.Option(
            help="JSONL: Spec-Bench, GSM8K, Self-Instruct, chat, plain, or system messages alone; may be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The directory that the draft is written to.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    work: Annotated[
        Path | None, typer.Option(help="Where answers and checkpoints are kept, to go on from; unset: OUT.work")
    ] = None,
    evaluate: Annotated[
        Path | None, typer.Option(help="Further prompts, never trained on: agreement is told by their category.")
    ] = None,
    evaluate_prompts: Annotated[int, typer.Option(help="How many of them in each task.")] = 8,
    held_out: Annotated[int, typer.Option(help="Prompts of each file kept from training (a tenth at most).")] = 48,
    temperatures: Annotated[str, typer.Option(help="Of a file's first pass, its second, and so on.")] = "0,0.7,1.0",
    answer_tokens: Annotated[int, typer.Option(help="Tokens of answers to train on.")] = 1_000_000,
    answer_minutes: Annotated[float, typer.Option(help="Most time for this run to spend on answers.")] = 30.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.")] = 384,
    layers: Annotated[str, typer.Option(help="Layers of the target that the student begins as: 0,1,29.")] = "",
    student_config: Annotated[
        Path | None, typer.Option(help="A transformers configuration with the target's vocabulary and width.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="The directory of a draft to train further, instead of layers.")
    ] = None,
    vocabulary_size: Annotated[
        int | None,
        typer.Option(help="Guess only so many tokens, the answers' most frequent; unset: all, or as --start does."),
    ] = None,
    loss: Annotated[str, typer.Option(help="forward_kl or reverse_kl.")] = "forward_kl",
    on_policy: Annotated[float, typer.Option(help="Share of batches that the student writes itself.")] = 0.0,
    minutes: Annotated[float | None, typer.Option(help="Time to train; the learning rate follows.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train, instead of minutes.")] = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 1e-3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens in a batch, prompts and padding included.")] = 4096,
    max_length: Annotated[int, typer.Option(help="Longest prompt and answer together, in tokens.")] = 512,
    precision: Annotated[str, typer.Option(help="Of products: bfloat16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu, cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    notes: Annotated[Path | None, typer.Option(help="Markdown to add to the model card.")] = None,
) -> None:
    """Make a draft: the target answers prompts, and a student learns to guess what it writes (Seq-KD)."""
    options = DistillOptions(
        prompts=tuple(prompts),
        out=out,
        work=work or out.with_name(f"{out.name}.work"),
        evaluate=evaluate,
        evaluate_prompts=evaluate_prompts,
        held_out=held_out,
        temperatures=_numbers("temperatures", temperatures, float),
        answer_tokens=answer_tokens,
        answer_minutes=answer_minutes,
        max_tokens=max_tokens,
        layers=_numbers("layers", layers, int),
        student_config=student_config,
        start=start,
        vocabulary_size=vocabulary_size,
        loss=loss,
        on_policy=on_policy,
        minutes=minutes,
        steps=steps,
        learning_rate=learning_rate,
        batch_tokens=batch_tokens,
        max_length=max_length,
        precision=precision,
        device=device,
        seed=seed,
        notes=notes,
    )
    chosen = tuple(assignments or ())
    settings: Settings = load_settings(config, chosen)
    from deploy.distillation.pipeline import run

    run(settings, options, options.command(config, chosen))


def _numbers(name: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigurationError(f"{_option(name)}: {text!r} is refused; it must be numbers with commas") from None


def _without_directories(assignment: str) -> str:
    key, _, value = assignment.partition("=")
    return f"{key}={Path(value).name}"


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _written(value: object) -> str:
    if isinstance(value, Path):
        return value.name
    parts = value if isinstance(value, tuple) else (value,)
    return ",".join(f"{part:g}" if isinstance(part, float) else str(part) for part in parts)
