"""What `transformers` writes for each sentence, kept in a file between runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, MarianTokenizer

from tests.translations.sentences import Sentence

_MOST_TOGETHER = 16

Report = Callable[[str], None]


@dataclass(frozen=True)
class Answer:
    """The tokens of a translation without the decoder's start, and its text."""

    tokens: tuple[int, ...]
    text: str


class Reference:
    """Greedy and beam translations of `generate` in float32, sentences of one length together."""

    def __init__(self, model: Path, most: int, kept: Path | None) -> None:
        """`most` bounds a translation, in tokens. `kept` is a file of JSON lines that grows with every translation."""
        with warnings.catch_warnings(action="ignore"):
            self._tokenizer: Any = MarianTokenizer.from_pretrained(model)
        self._directory = model
        self._most = most
        self._kept = kept
        self._model: Any = None
        self._known: dict[tuple[str, int, int], tuple[int, ...]] = {}
        for line in kept.read_text("utf-8").splitlines() if kept is not None and kept.exists() else ():
            found = json.loads(line)
            self._known[found["source"], found["beams"], found["most"]] = tuple(found["tokens"])

    def answers(self, sentences: Sequence[Sentence], beams: int, report: Report) -> list[Answer]:
        """The translations of all sentences, with that many beams."""
        keys = [(sentence.source, beams, self._most) for sentence in sentences]
        unknown = [source for source, *_ in dict.fromkeys(keys) if (source, beams, self._most) not in self._known]
        done = 0
        for sources in self._batches(unknown):
            report(f"transformers, {beams} beams: {done} of {len(unknown)}")
            for source, tokens in zip(sources, self._generate(sources, beams), strict=True):
                self._known[source, beams, self._most] = tokens
                self._keep((source, beams, self._most))
            done += len(sources)
        return [
            Answer(tokens, self._tokenizer.decode(tokens, skip_special_tokens=True))
            for tokens in map(self._known.__getitem__, keys)
        ]

    def _batches(self, sources: Sequence[str]) -> Iterator[list[str]]:
        """Sources of equal length in tokens, so that nothing is padded."""
        by_length: dict[int, list[str]] = {}
        for source in sources:
            by_length.setdefault(len(self._tokenizer(source).input_ids), []).append(source)
        for found in by_length.values():
            for first in range(0, len(found), _MOST_TOGETHER):
                yield found[first : first + _MOST_TOGETHER]

    @torch.inference_mode()
    def _generate(self, sources: Sequence[str], beams: int) -> list[tuple[int, ...]]:
        if self._model is None:
            self._model = AutoModelForSeq2SeqLM.from_pretrained(self._directory, dtype=torch.float32).eval()
        encoded = self._tokenizer(list(sources), return_tensors="pt")
        written = self._model.generate(
            **encoded, num_beams=beams, do_sample=False, max_new_tokens=self._most, max_length=None
        )
        end = self._model.generation_config.eos_token_id
        return [_until(end, row[1:].tolist()) for row in written]

    def _keep(self, key: tuple[str, int, int]) -> None:
        if self._kept is None:
            return
        source, beams, most = key
        line = {"source": source, "beams": beams, "most": most, "tokens": self._known[key]}
        with self._kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _until(end: int, tokens: list[int]) -> tuple[int, ...]:
    """The tokens up to the first one that ends an answer; padding follows it in a batch."""
    return tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens)
