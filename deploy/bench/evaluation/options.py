"""The options of `pilotfish bench tasks`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from cluster.core.errors import ConfigurationError
from deploy.bench.contest_options import ContestOptions
from deploy.bench.evaluation.tasks.translation import languages
from deploy.dataclass_options import check_at_least, flag

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
