"""The options of `pilotfish bench race`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from cluster.core.errors import ConfigurationError
from deploy.bench.contest_options import ContestOptions


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
