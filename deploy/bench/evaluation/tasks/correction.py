"""Grammar correction, from lines with a sentence (`source`) and corrected ones (`references`), as in JFLEG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.core.errors import ConfigurationError
from deploy.bench.evaluation.tasks.jsonl import Row, read_rows
from deploy.bench.evaluation.tasks.metrics import gleu, percentage, words
from deploy.bench.evaluation.tasks.task import Example, Scores, Task

OPTION = "--correction"
MAX_TOKENS_PER_SENTENCE = 64
_INSTRUCTION = "Correct the grammar and the spelling of this text. Write only the corrected text."
NOTES = (
    "GLEU: nltk's corpus_gleu (Wu et al. 2016), which is not the GLEU of JFLEG's paper, of answers and references in "
    "words as sacrebleu's tokenizer 13a splits them.",
    "Exact: answers that equal one of their references in words. Changed: answers that differ from the source in "
    "words; more is not better.",
)


def read_correction(file: Path, sentences: int, most: int) -> Task:
    """The task with that many consecutive sentences in each prompt. Raises `ConfigurationError`."""
    rows = read_rows(OPTION, file, most * sentences)
    groups = [rows[first : first + sentences] for first in range(0, len(rows) - sentences + 1, sentences)]
    if not groups:
        raise ConfigurationError(f"{OPTION} {file}: needed {sentences} lines for one prompt, found {len(rows)}")
    name = "correction" if sentences == 1 else f"correction of {sentences} sentences"
    examples = tuple(map(_example, groups))
    return Task(name, examples, MAX_TOKENS_PER_SENTENCE * sentences, score_correction, NOTES)


def _example(rows: Sequence[Row]) -> Example:
    """The i-th references of all sentences, joined, are the i-th reference of the text."""
    source = " ".join(row.text("source").strip() for row in rows)
    columns = zip(*(row.texts("references") for row in rows), strict=False)
    references = tuple(" ".join(text.strip() for text in column) for column in columns)
    return Example(f"{_INSTRUCTION}\n\n{source}", source, references, source)


def score_correction(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """GLEU, and the shares of exact and of changed answers."""
    split = [words(answer) for answer in answers]
    references = [[words(text) for text in example.references] for example in examples]
    return {
        "GLEU (nltk)": gleu(split, references),
        "exact, %": percentage([found in wanted for found, wanted in zip(split, references, strict=True)]),
        "changed, %": percentage(
            [found != words(example.source) for found, example in zip(split, examples, strict=True)]
        ),
    }
