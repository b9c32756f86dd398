"""Metrics of texts against references, as the libraries sacrebleu and nltk compute them. All are from 0 to 100."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from importlib import import_module
from types import ModuleType

from cluster.core.errors import ConfigurationError

_NUMBER = re.compile(r"(?:(?<![\w.])-)?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bleu_and_chrf(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Corpus BLEU and chrF2 with sacrebleu's defaults. Every answer has the same number of references."""
    metrics = _library("sacrebleu.metrics")
    streams = [list(stream) for stream in zip(*references, strict=True)]  # the i-th reference of every answer
    return {
        "BLEU": float(metrics.BLEU().corpus_score(list(answers), streams).score),
        "chrF": float(metrics.CHRF().corpus_score(list(answers), streams).score),
    }


def chrf(answers: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF2 with sacrebleu's defaults: 100 if each answer equals its only reference."""
    if list(answers) == list(references):
        return 100.0  # also for empty texts, which have no characters to count
    return float(_library("sacrebleu.metrics").CHRF().corpus_score(list(answers), [list(references)]).score)


def gleu(answers: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]) -> float:
    """Corpus GLEU (Wu et al. 2016) with nltk's defaults, of texts that are split into words."""
    scorer = _library("nltk.translate.gleu_score")
    return 100.0 * float(scorer.corpus_gleu([list(map(list, found)) for found in references], list(map(list, answers))))


def words(text: str) -> tuple[str, ...]:
    """The text in words and punctuation marks, as sacrebleu's tokenizer `13a` splits it."""
    split = _library("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    return tuple(str(split(text.strip())).split())


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without commas between its digits; `None` without a number."""
    found = _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "")) if found else None
    except InvalidOperation:
        return None


def normalized(text: str) -> str:
    """A text in lower case without punctuation, articles and repeated spaces, as SQuAD's evaluation compares them."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def contains_one(answer: str, references: Sequence[str]) -> bool:
    """Whether a normalized text contains one of the normalized references as whole words."""
    text = f" {normalized(answer)} "
    return any(f" {wanted} " in text for wanted in map(normalized, references) if wanted)


def percentage(hits: Sequence[bool]) -> float:
    """The share of true values in percent; 0 without values."""
    return 100.0 * sum(hits) / len(hits) if hits else 0.0


def _library(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigurationError(f"this task needs {package}: pip install 'pilotfish[bench]'; {error}") from None
