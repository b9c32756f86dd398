"""The options of the commands of `pilotfish bench`. Each is declared once, with its type, default and help text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from cluster.core.errors import ConfigurationError
from deploy.dataclass_options import check_at_least, check_directory, flag, refuse
from deploy.network.https_client import CacertOption, UrlOption, server_root


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
        check_directory(self, "out")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOptions(ContestOptions):
    """The options of one race. Raises `ConfigurationError` for a value out of bounds."""

    POSITIVE: ClassVar[tuple[str, ...]] = (*ContestOptions.POSITIVE, "prompts_per_task", "max_tokens")

    prompts: Annotated[
        tuple[Path, ...],
        "A JSONL file of prompts: Spec-Bench, HumanEval, GSM8K, Self-Instruct, chat messages or plain text. "
        "May be repeated.",
    ]
    prompts_per_task: Annotated[int, "Prompts of each task."] = 8
    max_tokens: Annotated[int, "Maximum number of tokens in one answer."] = 128

    def __post_init__(self) -> None:
        ContestOptions.__post_init__(self)
        if not self.prompts:
            raise ConfigurationError("--prompts: needed at least one file, found none")


LANGUAGES = {"cs": "Czech", "de": "German", "en": "English", "fr": "French"}
_FILES = ("translation", "correction", "spec_bench", "arithmetic", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions(ContestOptions):
    """The options of one evaluation. Raises `ConfigurationError` for a value out of bounds."""

    POSITIVE: ClassVar[tuple[str, ...]] = (*ContestOptions.POSITIVE, "examples", "sentences_per_prompt")
    WITH_URL: ClassVar[tuple[str, ...]] = (*ContestOptions.WITH_URL, "server_pid", "send_prediction")

    translation: Annotated[Path | None, "JSONL with one sentence in several languages per line, as in Multi30k."] = None
    languages: Annotated[str, typer.Option(metavar="PAIR", help="Source and target of the translation.")] = "fr-en"
    translator: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Another target, for --translation alone: a directory, hub id or packaged name. Its results are in "
            "the directory `translation` of --out. Unset: target.path of the settings.",
        ),
    ] = ""
    correction: Annotated[Path | None, "JSONL with `source` and `references` per line, as in JFLEG."] = None
    sentences_per_prompt: Annotated[int, "Consecutive sentences of --correction in a prompt."] = 1
    spec_bench: Annotated[
        Path | None, "Spec-Bench's JSONL: retrieval, summarization, mathematics, translation, qa."
    ] = None
    arithmetic: Annotated[Path | None, "JSONL with `question` and `answer` (`#### NUMBER`) per line, as in GSM8K."] = (
        None
    )
    code: Annotated[Path | None, "JSONL with `prompt`, `entry_point` and `test` per line, as in HumanEval."] = None
    execute_code: Annotated[
        bool,
        "Run the functions that the model writes for --code, each in a process with limits of time and "
        "memory, which is no sandbox. Without this, --code is left out.",
    ] = False
    examples: Annotated[int, "Prompts of each task."] = 32
    max_tokens: Annotated[int, "Maximum number of tokens in one answer; 0 takes the bound of each task."] = 0
    form: Annotated[
        Literal["auto", "instruction", "source"],
        "`instruction` asks in a sentence, `source` sends the source text alone; `auto` does that for "
        "encoder-decoder models.",
    ] = "auto"
    server_pid: Annotated[
        tuple[int, ...],
        typer.Option(help="Process of the server at --url on this machine, measured with its children. Repeatable."),
    ] = ()
    send_prediction: Annotated[bool, "Send the source text as `prediction` to --url, where a task copies it."] = False

    def __post_init__(self) -> None:
        ContestOptions.__post_init__(self)
        if not any(getattr(self, name) for name in _FILES):
            raise ConfigurationError(f"needed at least one of {', '.join(map(flag, _FILES))}, found none")
        if self.translator and (self.translation is None or self.url):
            raise ConfigurationError("--translator: needed with --translation and without --url, found otherwise")
        check_at_least(self, {"max_tokens": 0})
        languages(self.languages)


def languages(pair: str) -> tuple[str, str]:
    """The languages of a pair such as `fr-en`. Raises `ConfigurationError`."""
    source, _, goal = pair.partition("-")
    if source == goal or source not in LANGUAGES or goal not in LANGUAGES:
        raise ConfigurationError(f"--languages: {pair!r} is refused; it must be two of {', '.join(LANGUAGES)}: fr-en")
    return source, goal


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementOptions:
    """The options of one comparison. Raises `ConfigurationError` for a value out of bounds."""

    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL of prompts (Spec-Bench, GSM8K, chat messages, …) or of lines with `text`, or plain text with "
            "one text per line. For a target with an encoder: JSONL with a source and a text per line, as in Multi30k."
        ),
    ]
    fields: Annotated[
        str,
        typer.Option(metavar="SOURCE,TEXT", help="Fields of each line, for a target with an encoder."),
    ] = "fr,en"
    draft: Annotated[str, "The draft model: a directory, hub id or packaged name. Unset: the target's own."] = ""
    target: Annotated[str, "The target: a directory, hub id or packaged name. Unset: target.path of the settings."] = ""
    texts: Annotated[int, "Texts of the file that are read."] = 16
    text_tokens: Annotated[int, "First tokens of each text that are compared."] = 256
    max_tokens: Annotated[int, "Maximum number of tokens in each of the target's answers."] = 64
    temperature: Annotated[float, "Temperature of the distributions for Σ min(p, q)."] = 1.0
    measure: Annotated[
        bool,
        "Also answer the texts as prompts, with and without the draft model, and compare the predicted with "
        "the measured speed.",
    ] = True
    out: Annotated[Path | None, "Directory for agreement.json and agreement.md."] = None

    def __post_init__(self) -> None:
        check_at_least(self, {"texts": 1, "max_tokens": 1, "text_tokens": 1})
        check_directory(self, "out")
        if not 0 < self.temperature <= 10:
            refuse(self, "temperature", "it must be above 0, at most 10")


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
        check_directory(self, "out")
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
