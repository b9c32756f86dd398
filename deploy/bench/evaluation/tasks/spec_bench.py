"""The tasks of Spec-Bench (Xia et al. 2024): lines with `category`, `turns` and, for most, `reference`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.tasks.arithmetic import NOTE as ARITHMETIC_NOTE
from deploy.bench.evaluation.tasks.arithmetic import score_arithmetic
from deploy.bench.evaluation.tasks.jsonl import Row, read_rows
from deploy.bench.evaluation.tasks.metrics import chrf, contains_one, last_number, percentage
from deploy.bench.evaluation.tasks.task import Example, Scorer, Scores, Task, no_scores
from deploy.bench.evaluation.tasks.translation import NOTE as TRANSLATION_NOTE
from deploy.bench.evaluation.tasks.translation import score_translation

OPTION = "--spec-bench"
MAX_TOKENS = {"math_reasoning": 320, "rag": 128, "qa": 128, "summarization": 160, "translation": 96}
_NAMES = {"math_reasoning": "mathematics", "rag": "retrieval", "qa": "question-answering"}
"""Names of the tasks in the tables, where they differ from the categories in the file."""
_RETRIEVAL_NOTE = (
    "Contains an answer: the share of answers with one of the references in them, without case, punctuation and "
    "articles."
)
_SUMMARY_NOTE = (
    "chrF: sacrebleu with its defaults, over the whole corpus, against the reference summary. Two good summaries may "
    "differ much."
)
_NO_METRIC = "No metric: only equality with plain decoding, chrF to its answers, and the number of tokens."


def read_spec_bench(file: Path, most: int) -> tuple[Task, ...]:
    """The tasks of a file, each with its first `most` lines. Categories of MT-bench, which have no references, are left
    out. Raises `ConfigurationError`.
    """
    rows: dict[str, list[Row]] = {}
    for row in read_rows(OPTION, file):
        category = row.text("category")
        if category in MAX_TOKENS:
            rows.setdefault(category, []).append(row)
    if not rows:
        raise ConfigurationError(f"{OPTION} {file}: needed one of the categories {', '.join(MAX_TOKENS)}, found none")
    return tuple(_task(category, found[:most]) for category, found in sorted(rows.items()))


def _task(category: str, rows: Sequence[Row]) -> Task:
    examples = tuple(map(_example, rows))
    scorer, notes = _scorer(category, examples)
    return Task(f"spec-bench {_NAMES.get(category, category)}", examples, MAX_TOKENS[category], scorer, notes)


def _scorer(category: str, examples: Sequence[Example]) -> tuple[Scorer, tuple[str, ...]]:
    """The metric of a category, if every example has what it needs."""
    if all(example.references for example in examples):
        has_one_each = all(len(example.references) == 1 for example in examples)
        if category == "translation" and has_one_each:
            return score_translation, (TRANSLATION_NOTE,)
        if category == "summarization" and has_one_each:
            return score_summaries, (_SUMMARY_NOTE,)
        if category == "rag":
            return score_retrieval, (_RETRIEVAL_NOTE,)
        if category == "math_reasoning" and all(last_number(_result(example)) is not None for example in examples):
            return score_arithmetic, (ARITHMETIC_NOTE,)
    return no_scores, (_NO_METRIC,)


def _result(example: Example) -> str:
    return example.references[0].rpartition("####")[2]


def _example(row: Row) -> Example:
    prompt = row.texts("turns")[0]
    return Example(prompt, prompt, tuple(_texts(row.values.get("reference"))))


def _texts(value: Any) -> Iterator[str]:
    """The references, which some lines nest."""
    if isinstance(value, str) and value.strip():
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def score_summaries(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """chrF with the only reference of each example."""
    found = [answer.strip() for answer in answers]
    return {"chrF": chrf(found, [example.references[0].strip() for example in examples])}


def score_retrieval(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """The share of answers that contain a reference."""
    return {
        "contains an answer, %": percentage(
            [contains_one(answer, example.references) for example, answer in zip(examples, answers, strict=True)]
        )
    }
