"""The options that `pilotfish bench race` and `pilotfish bench tasks` share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import check_at_least, flag, refuse
from deploy.network.https_client import CacertOption, server_root


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestOptions:
    """The options that `pilotfish bench race` and `pilotfish bench tasks` share, with type, default and help text.

    Raises `ConfigurationError` for a value out of bounds.
    """

    POSITIVE: ClassVar[tuple[str, ...]] = ("repeats", "together", "devices")
    """Options that must be at least 1."""
    WITH_URL: ClassVar[tuple[str, ...]] = ("plain_url", "cacert")
    """Options that mean something only with `url`."""

    out: Annotated[Path, "Directory for the results in JSON and Markdown, and for the plots."]
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="Tasks to run, with commas between them. Unset: all")] = ""
    batches: Annotated[tuple[int, ...], "Numbers of requests in flight, with commas between them."] = (1,)
    temperatures: Annotated[tuple[float, ...], "Temperatures, with commas between them; 0 is greedy."] = (0.0,)
    methods: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Drafting methods, with commas between them; `none` measures plain decoding against itself. "
            "Unset: all methods that can run, or only the configurations if there are any",
        ),
    ] = ""
    configuration: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="NAME=KEY=VALUE,KEY=VALUE",
            help="A further competitor: its name, its settings, and what its requests change (`request.beams=4`). Or "
            "a YAML file with a list of `name` and `set`, or the name of a combination that comes with Pilotfish: "
            "int8, prefix-cache, window, beams, long-context. May be repeated.",
        ),
    ] = ()
    peers: Annotated[bool, "Run the decoding methods of transformers on the same prompts."] = True
    peer_seconds: Annotated[
        int,
        "Longest time of one method of transformers for one task, in seconds. A slower one is left out there, "
        "with the reason. 0: two seconds for each token that may be asked, at least 600.",
    ] = 0
    repeats: Annotated[int, "Repetitions of each measurement."] = 1
    together: Annotated[
        int,
        "Competitors that are held in memory at a time. They answer one after another, between two passes of "
        "plain decoding that they share.",
    ] = 1
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Measure this OpenAI-compatible server instead of own clusters.")
    ] = None
    plain_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The same model without drafts, to compare --url with.")
    ] = None
    cacert: CacertOption = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name at --url and --plain-url.")] = None
    devices: Annotated[int, "Devices behind --url; --plain-url counts as one."] = 1
    seed: Annotated[int, "Seed of the first prompt of a task; the next prompt's is one higher."] = 0

    def __post_init__(self) -> None:
        check_at_least(self, dict.fromkeys(self.POSITIVE, 1) | {"peer_seconds": 0})
        if not self.batches or any(batch < 1 for batch in self.batches):
            refuse(self, "batches", "each must be at least 1")
        if not self.temperatures or any(not 0 <= temperature <= 2 for temperature in self.temperatures):
            refuse(self, "temperatures", "each must be within 0 and 2")
        if not 0 <= self.seed < 1 << 63:
            refuse(self, "seed", f"it must be within 0 and {(1 << 63) - 1}")
        self._check_url()

    def _check_url(self) -> None:
        if (self.url is None) != (self.model is None):
            raise ConfigurationError("--url and --model: needed both or neither, found one")
        for name in ("url", "plain_url"):
            if getattr(self, name) is not None:
                server_root(getattr(self, name), flag(name))
        if self.url is None:
            for name in self.WITH_URL:
                if getattr(self, name):
                    raise ConfigurationError(f"{flag(name)}: needed with --url, found alone")
        elif self.methods or self.configuration:
            raise ConfigurationError("--url: needed without --methods and --configuration, found with them")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The chosen tasks; empty: all."""
        return _names(self.tasks)

    @property
    def method_names(self) -> tuple[str, ...]:
        """The chosen methods; empty: not chosen."""
        return _names(self.methods)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
