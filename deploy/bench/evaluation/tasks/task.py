"""What a task with references is: examples, how they are asked, and how answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with its references."""

    instruction: str
    """The prompt for a model that follows instructions."""
    source: str
    """The text that is translated, corrected or summarized: the whole prompt of an encoder-decoder model."""
    references: tuple[str, ...] = ()
    """Right answers; empty where none are known."""
    prediction: str = ""
    """Text that the answer is expected to repeat; empty: the prompt."""
    program: str = ""
    """For code: the test of the function. Empty otherwise."""
    entry_point: str = ""
    """For code: the name of the function."""

    def prompt(self, *, source_alone: bool) -> str:
        """The text that the model reads."""
        return self.source if source_alone else self.instruction


Scores = Mapping[str, float]
"""Figures by name, from 0 to 100, where more is better unless the task's notes say otherwise."""
Scorer = Callable[[Sequence[Example], Sequence[str]], Scores]


def no_scores(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """The scorer of a task without references or without a metric."""
    del examples, answers
    return {}


@dataclass(frozen=True, slots=True)
class Task:
    """A task: examples and the metric of their answers."""

    name: str
    examples: tuple[Example, ...]
    max_tokens: int
    """Maximum number of tokens in one answer."""
    score: Scorer = no_scores
    notes: tuple[str, ...] = field(default=())
    """What the metrics are, in sentences for the report."""
