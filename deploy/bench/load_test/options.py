"""The options of `pilotfish bench serve`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import check_at_least, refuse
from deploy.network.https_client import CacertOption, UrlOption, server_root

_AT_LEAST_ONE = ("num_prompts", "max_tokens", "random_input_len")
GOODPUT_FIGURES = ("ttft", "tpot", "itl", "e2el")
"""Figures that a goodput bound may name. They are those of `vllm bench serve`."""


class Endpoint(StrEnum):
    """The route that is measured."""

    CHAT = "chat"
    COMPLETIONS = "completions"

    @property
    def path(self) -> str:
        """The path of the route."""
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The options of one load test. Raises `ConfigurationError` for a value out of bounds."""

    url: UrlOption = None
    cacert: CacertOption = None
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The served model. Unset: the first that the server lists.")
    ] = None
    endpoint: Annotated[Endpoint, "Chat completions or completions."] = Endpoint.CHAT
    prompts: Annotated[
        tuple[Path, ...],
        "A JSONL file of prompts: Spec-Bench, HumanEval, GSM8K, Self-Instruct, chat messages or plain text. "
        "May be repeated. Unset: random words.",
    ] = ()
    num_prompts: Annotated[int, "Requests of each measurement. A file with too few prompts begins anew."] = 64
    same_prompts: Annotated[
        bool,
        typer.Option("--same-prompts", help="Send the same prompts in each measurement, to measure the prefix cache."),
    ] = False
    random_input_len: Annotated[int, "Words of a random prompt."] = 128
    max_tokens: Annotated[int, "Maximum number of tokens in one answer."] = 128
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers have exactly --max-tokens tokens (vLLM, Pilotfish).")
    ] = False
    temperature: Annotated[float, "0 always takes the most probable token."] = 0.0
    request_rate: Annotated[
        tuple[float, ...], "Requests per second, with commas between several measurements; inf sends all at once."
    ] = (math.inf,)
    burstiness: Annotated[
        float, "1: arrivals are a Poisson process; below, they come in bursts; above, more evenly."
    ] = 1.0
    max_concurrency: Annotated[
        tuple[int, ...], "Most requests in flight, with commas between several measurements; 0 sets no bound."
    ] = (0,)
    goodput: Annotated[
        tuple[str, ...],
        typer.Option(
            metavar="NAME:MS",
            help="Count the requests that keep these bounds in milliseconds: ttft, tpot, itl, e2el.",
        ),
    ] = ()
    seed: Annotated[int, "Seed of arrivals and random prompts; also of the first request."] = 0
    timeout: Annotated[float, "Longest time of one request, in seconds."] = 3600.0
    out: Annotated[Path | None, "Directory for serve.json, serve.md and serve.png. Unset: nothing is written."] = None

    def __post_init__(self) -> None:
        check_at_least(self, dict.fromkeys(_AT_LEAST_ONE, 1))
        if not self.request_rate or any(not rate > 0 for rate in self.request_rate):
            refuse(self, "request_rate", "each must be above 0")
        if not self.max_concurrency or any(bound < 0 for bound in self.max_concurrency):
            refuse(self, "max_concurrency", "each must be at least 0")
        if not 0 < self.burstiness < math.inf:
            refuse(self, "burstiness", "it must be above 0")
        if not 0 <= self.temperature <= 2:
            refuse(self, "temperature", "it must be within 0 and 2")
        if not 0 < self.timeout < math.inf:
            refuse(self, "timeout", "it must be above 0")
        if not 0 <= self.seed < 1 << 63:
            refuse(self, "seed", f"it must be within 0 and {(1 << 63) - 1}")
        parse_goodput(self.goodput)
        if self.url is not None:
            server_root(self.url)


def parse_goodput(bounds: Sequence[str]) -> dict[str, float]:
    """The bounds in seconds by figure, from `ttft:500` and the like, with spaces or commas between several.

    Raises `ConfigurationError`.
    """
    found: dict[str, float] = {}
    for part in " ".join(bounds).replace(",", " ").split():
        name, _, text = part.partition(":")
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = math.nan
        if name not in GOODPUT_FIGURES or not 0 < milliseconds < math.inf:
            known = ", ".join(GOODPUT_FIGURES)
            raise ConfigurationError(f"--goodput: {part!r} is refused; it must be NAME:MS with a name of {known}")
        found[name] = milliseconds / 1e3
    return found
