"""Translation, from lines with one sentence in several languages, as in Multi30k."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.bench.evaluation.tasks.jsonl import read_rows
from deploy.bench.evaluation.tasks.metrics import bleu_and_chrf
from deploy.bench.evaluation.tasks.task import Example, Scores, Task
from deploy.bench.options import LANGUAGES, languages

OPTION = "--translation"
TASK = "translation "
"""Beginning of the names of these tasks, before the languages."""
MAX_TOKENS = 96
NOTE = "BLEU and chrF: sacrebleu with its defaults, over the whole corpus."


def read_translation(file: Path, pair: str, most: int) -> Task:
    """The task of a file whose lines have a sentence in both languages of the pair. Raises `ConfigurationError`."""
    source, goal = languages(pair)
    instruction = f"Translate this sentence from {LANGUAGES[source]} to {LANGUAGES[goal]}. Write only the translation."
    examples = tuple(
        Example(f"{instruction}\n\n{row.text(source)}", row.text(source), (row.text(goal),))
        for row in read_rows(OPTION, file, most)
    )
    return Task(f"{TASK}{pair}", examples, MAX_TOKENS, score_translation, (NOTE,))


def score_translation(examples: Sequence[Example], answers: Sequence[str]) -> Scores:
    """BLEU and chrF."""
    return bleu_and_chrf([answer.strip() for answer in answers], [example.references for example in examples])
