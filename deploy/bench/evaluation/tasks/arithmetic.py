"""Arithmetic, from lines with a `question` and an `answer` that ends with `#### NUMBER`, as in GSM8K."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.tasks.jsonl import Row, read_rows
from deploy.bench.evaluation.tasks.metrics import last_number, percentage
from deploy.bench.evaluation.tasks.task import Example, Scores, Task

OPTION = "--arithmetic"
MAX_TOKENS = 320
NOTE = "Exact match: the last number of the answer equals the reference's."


def read_arithmetic(file: Path, most: int) -> Task:
    """The task of a file. Raises `ConfigurationError`."""
    examples = tuple(map(_example, read_rows(OPTION, file, most)))
    return Task("arithmetic", examples, MAX_TOKENS, score_arithmetic, (NOTE,))


def _example(row: Row) -> Example:
    question, reference = row.text("question"), row.text("answer").rpartition("####")[2].strip()
    if last_number(reference) is None:
        raise ConfigurationError(f"{row.where}: answer: needed a number after ####, found {reference[:80]!r}")
    return Example(question, question, (reference,))


def score_arithmetic(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """The share of right numbers."""
    wanted = [last_number(example.references[0].rpartition("####")[2]) for example in examples]
    found = [last_number(answer) for answer in answers]
    return {
        "exact match, %": percentage(
            [number is not None and number == right for number, right in zip(found, wanted, strict=True)]
        )
    }
