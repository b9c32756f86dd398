"""The options of `pilotfish bench tasks`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.tasks.translation import languages
from deploy.bench.option_types import Batches, Configurations, Peers, Repeats, Temperatures, Together

_POSITIVE = ("examples", "sentences_per_prompt", "repeats", "together", "devices")
_FILES = ("translation", "correction", "spec_bench", "arithmetic", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """The options of one evaluation. Raises `ConfigurationError` for a value out of bounds."""

    out: Annotated[Path, typer.Option(help="Directory for tasks.json, tasks.md and the plots.")]
    translation: Annotated[
        Path | None, typer.Option(help="JSONL with one sentence in several languages per line, as in Multi30k.")
    ] = None
    languages: Annotated[str, typer.Option(metavar="PAIR", help="Source and target of the translation.")] = "fr-en"
    correction: Annotated[
        Path | None, typer.Option(help="JSONL with `source` and `references` per line, as in JFLEG.")
    ] = None
    sentences_per_prompt: Annotated[int, typer.Option(help="Consecutive sentences of --correction in a prompt.")] = 1
    spec_bench: Annotated[
        Path | None, typer.Option(help="Spec-Bench's JSONL: retrieval, summarization, mathematics, translation, qa.")
    ] = None
    arithmetic: Annotated[
        Path | None, typer.Option(help="JSONL with `question` and `answer` (`#### NUMBER`) per line, as in GSM8K.")
    ] = None
    code: Annotated[
        Path | None,
        typer.Option(help="JSONL with `prompt`, `entry_point` and `test` per line, as in HumanEval."),
    ] = None
    execute_code: Annotated[
        bool,
        typer.Option(
            help="Run the functions that the model writes for --code, each in a process with limits of time and "
            "memory, which is no sandbox. Without this, --code is left out."
        ),
    ] = False
    only: Annotated[str, typer.Option(metavar="NAMES", help="Tasks to run, with commas between them. Unset: all")] = ""
    examples: Annotated[int, typer.Option(help="Prompts of each task.")] = 32
    max_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens in one answer; 0 takes the bound of each task.")
    ] = 0
    form: Annotated[
        Literal["auto", "instruction", "source"],
        typer.Option(
            help="`instruction` asks in a sentence, `source` sends the source text alone; `auto` does that for "
            "encoder-decoder models."
        ),
    ] = "auto"
    batches: Batches = (1,)
    temperatures: Temperatures = (0.0,)
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Drafting methods, with commas between them. Unset: all methods that can run, or only the "
            "configurations if there are any",
        ),
    ] = ""
    configuration: Configurations = ()
    peers: Peers = True
    repeats: Repeats = 1
    together: Together = 1
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this OpenAI-compatible server instead of own clusters.")
    ] = None
    plain_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model without drafts, to compare --url with.")
    ] = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at --url and --plain-url.")] = None
    devices: Annotated[int, typer.Option(help="Devices behind --url; --plain-url counts as one.")] = 1
    server_pid: Annotated[
        tuple[int, ...],
        typer.Option(help="Process of the server at --url on this machine, measured with its children. Repeatable."),
    ] = ()
    send_prediction: Annotated[
        bool, typer.Option(help="Send the source text as `prediction` to --url, where a task copies it.")
    ] = False
    seed: Annotated[int, typer.Option(help="Seed of the first prompt of a task; the next prompt's is one higher.")] = 0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                self._refuse(name, getattr(self, name), "it must be at least 1")
        if not any(getattr(self, name) for name in _FILES):
            raise ConfigurationError(f"needed at least one of {', '.join(map(_option, _FILES))}, found none")
        if self.max_tokens < 0:
            self._refuse("max_tokens", self.max_tokens, "it must be at least 0")
        if not self.batches or any(batch < 1 for batch in self.batches):
            self._refuse("batches", self.batches, "each must be at least 1")
        if not self.temperatures or any(not 0 <= temperature <= 2 for temperature in self.temperatures):
            self._refuse("temperatures", self.temperatures, "each must be within 0 and 2")
        if not 0 <= self.seed < 1 << 63:
            self._refuse("seed", self.seed, f"it must be within 0 and {(1 << 63) - 1}")
        languages(self.languages)
        self._check_url()

    def _check_url(self) -> None:
        if (self.url is None) != (self.model is None):
            raise ConfigurationError("--url and --model: needed both or neither, found one")
        if self.url is None:
            for name in ("plain_url", "server_pid", "send_prediction"):
                if getattr(self, name):
                    raise ConfigurationError(f"{_option(name)}: needed with --url, found alone")
        elif self.methods or self.configuration:
            raise ConfigurationError("--url: needed without --methods and --configuration, found with them")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The chosen tasks; empty: all."""
        return _names(self.only)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The chosen methods; empty: not chosen."""
        return _names(self.methods)

    @staticmethod
    def _refuse(name: str, value: object, bound: str) -> None:
        raise ConfigurationError(f"{_option(name)}: {value} is refused; {bound}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
