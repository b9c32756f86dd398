"""One distillation: its options and its target, and what it needs of the program that runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from cluster.core.config.sections import Configuration
from workers.distill.answers import AnswerFile
from workers.distill.options import DistillOptions
from workers.distill.prompts import Task

ReadStates = Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[Sequence[int]]], list[Tensor]]
"""The taps of rows, bfloat16 [tokens, taps x hidden size] each. It is called with the token ids of the rows, the taps,
and what an encoder reads for each row; `taps_of` of `modules.tap_cache` with a model is one."""
StageReport = Callable[[float, str], None]
"""Called with the finished share of a stage, between 0 and 1, and its state in words."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits on the answers to generate. Generation ends at the first limit that is reached."""

    answer_tokens: int
    """Number of tokens in all answers to train on, including those of earlier runs."""
    seconds: float
    """Maximum duration of this run, in seconds."""
    max_tokens: int = 384
    """Maximum number of tokens in one answer."""
    alternatives: int = 16
    """How many of the target's most probable tokens are stored with each token of an answer."""
    ends: float = math.inf
    """When conversations in flight are abandoned, on the clock of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """What a cluster counted that served a module."""

    prompts: int
    tokens: int
    """Tokens of all answers."""
    steps: int
    """Forward passes of the target that decided them, summed over the answers."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one pass of the target adds to an answer (τ)."""
        return self.tokens / max(1, self.steps)


class Notices(Protocol):
    """Tells a person what happens."""

    def print(self, text: str) -> None:
        """Write one line."""

    def stage(self, title: str, seconds: float = math.inf) -> AbstractContextManager[StageReport]:
        """Show the progress of a stage while the context lasts. It takes at most so many seconds."""


class ServedTarget(Protocol):
    """The target as a cluster serves it, and the text that it reads."""

    def read_sources(self, path: Path, field: str | None) -> tuple[str, ...]:
        """The sources in a file for an encoder-decoder target. Raises `InvalidRequest`, which names the line."""

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text, with the special tokens of the target."""

    def answer(self, tasks: Iterable[Task], file: AnswerFile, quota: Quota, report: Callable[[int], None]) -> None:
        """Append the target's answers that are not yet in `file`, until the quota is met.

        Conversations that have begun are finished, and held-out tasks are always answered, unless `quota.ends` comes
        first. `report` is called with the number of answer tokens so far. Raises `PilotfishError`.
        """

    def draft_with(self, module: Path, kind: str, prompts: Sequence[tuple[int, ...]], most_tokens: int) -> ServedTokens:
        """Answer the prompts greedily with drafts of the module of this kind in a directory.

        Each answer has at most `most_tokens` tokens. The settings are those of the command but for the drafting method,
        its path, and the controller, which is off: every step drafts the largest tree, so that the figure does not
        depend on how busy the machine is. Raises `PilotfishError`, `OSError` and `torch.OutOfMemoryError`.
        """


class StateRanks(Protocol):
    """The target on the serving engine, which shows hidden states of texts. It starts where they are read."""

    @property
    def settings(self) -> str:
        """Names the settings that hidden states depend on beside weights; empty if all have their defaults."""

    def reading(self, taps: Sequence[int]) -> ReadStates:
        """What computes these hidden states. Returns once the target can. Raises `PilotfishError`."""


@dataclass(frozen=True, slots=True)
class DistillJob:
    """What all stages of one command share."""

    options: DistillOptions
    configuration: Configuration
    """The configuration of the command. Its models are named by their directories."""
    target: Path
    """The target's directory."""
    name: str
    """The name under which the target is served."""
    command_line: str
    """The command, for the model card."""
    notices: Notices
    served: ServedTarget
    ranks: Callable[[int], AbstractContextManager[StateRanks]]
    """The target for texts of so many tokens at most. Its memory is free when the context ends."""
