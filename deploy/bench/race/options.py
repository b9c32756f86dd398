"""The options of `pilotfish bench race`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cluster.core.errors import ConfigurationError
from deploy.bench.option_types import Batches, Configurations, Peers, Repeats, Temperatures, Together

_POSITIVE = ("prompts_per_task", "max_tokens", "repeats", "together", "devices")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOptions:
    """The options of one race. Raises `ConfigurationError` for a value out of bounds."""

    prompts: Annotated[
        tuple[Path, ...],
        typer.Option(
            help="A JSONL file of prompts: Spec-Bench, HumanEval, GSM8K, Self-Instruct, chat messages or plain text. "
            "May be repeated."
        ),
    ]
    out: Annotated[Path, typer.Option(help="Directory for race.json, race.md and the plots.")]
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="Tasks to run, with commas between them. Unset: all")] = ""
    prompts_per_task: Annotated[int, typer.Option(help="Prompts of each task.")] = 8
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens in one answer.")] = 128
    batches: Batches = (1, 8)
    temperatures: Temperatures = (0.0,)
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Drafting methods, with commas between them; `none` measures plain decoding against itself. "
            "Unset: all methods that can run, or only the configurations if there are any",
        ),
    ] = ""
    configuration: Configurations = ()
    peers: Peers = True
    repeats: Repeats = 1
    together: Together = 1
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this OpenAI-compatible server instead of own clusters.")
    ] = None
    plain_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model without drafts, to compare --endpoint with.")
    ] = None
    devices: Annotated[int, typer.Option(help="Devices behind --endpoint; --plain-endpoint counts as one.")] = 1
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at the endpoints.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the first prompt of a task; the next prompt's is one higher.")] = 0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                self._refuse(name, getattr(self, name), "it must be at least 1")
        if not self.prompts:
            raise ConfigurationError("--prompts: needed at least one file, found none")
        if not self.batches or any(batch < 1 for batch in self.batches):
            self._refuse("batches", self.batches, "each must be at least 1")
        if not self.temperatures or any(not 0 <= temperature <= 2 for temperature in self.temperatures):
            self._refuse("temperatures", self.temperatures, "each must be within 0 and 2")
        if not 0 <= self.seed < 1 << 63:
            self._refuse("seed", self.seed, f"it must be within 0 and {(1 << 63) - 1}")
        if (self.endpoint is None) != (self.model is None):
            raise ConfigurationError("--endpoint and --model: needed both or neither, found one")
        if self.endpoint is None and self.plain_endpoint is not None:
            raise ConfigurationError("--plain-endpoint: needed with --endpoint, found alone")
        if self.endpoint is not None and (self.methods or self.configuration):
            raise ConfigurationError("--endpoint: needed without --methods and --configuration, found with them")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The chosen tasks; empty: all."""
        return _names(self.tasks)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The chosen methods; empty: not chosen."""
        return _names(self.methods)

    @staticmethod
    def _refuse(name: str, value: object, bound: str) -> None:
        raise ConfigurationError(f"--{name.replace('_', '-')}: {value} is refused; {bound}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
