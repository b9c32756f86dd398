"""The short texts of a model's trial, and the steps of every kind that read them.

This module does without `transformers`, whose import takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cluster.core.config.model_section import PoolSection
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.groups import group_layers
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore

_BLOCKS_PER_TABLE = 40
_STRIDE = 7919  # a prime: it spreads the trial's tokens over the vocabulary
_FIRST_TOKEN = 4
_TEXT, _NEIGHBOR = 12, 9
"""Tokens of the trial's two texts."""
_STORED = 6
"""Tokens of the text that are stored before a chain or a tree."""
_PATHS = ((3, 4, 5), (1,))
"""Numbers of the tokens of the tree's branches. They meet where a small vocabulary gives them one token."""

Row = tuple[int, tuple[int, ...], TokenTree]
"""A sequence's number, its fresh tokens and its tree."""


@dataclass(frozen=True, slots=True)
class TrialTexts:
    """The tokens of the trial."""

    text: tuple[int, ...]
    neighbor: tuple[int, ...]
    tree: TokenTree
    """Tree that grows from the first tokens of the text."""

    @property
    def branches(self) -> list[tuple[int, ...]]:
        """The text before the tree with each path to a leaf."""
        return [(*self.text[: _STORED + 1], *path) for path in self.tree.candidates()]


def trial_texts(vocabulary: int) -> TrialTexts:
    """The texts in a vocabulary of so many tokens."""
    paths = [tuple(trial_token(2 * _TEXT + number, vocabulary) for number in path) for path in _PATHS]
    return TrialTexts(
        tuple(trial_token(index, vocabulary) for index in range(_TEXT)),
        tuple(trial_token(_TEXT + index, vocabulary) for index in range(_NEIGHBOR)),
        TokenTree.from_candidates(paths, sum(map(len, paths))),
    )


def trial_token(number: int, vocabulary: int) -> int:
    """One of the vocabulary's tokens. The first few are avoided: padding among them has a meaning of its own."""
    first = min(_FIRST_TOKEN, vocabulary - 1)
    return first + (number + 1) * _STRIDE % (vocabulary - first)


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """What a step computed of one token."""

    kind: str
    """How the step reads the text, for messages."""
    text: tuple[int, ...]
    """The tokens up to this one."""
    logits: torch.Tensor
    """Float32 `[vocabulary (this rank's part)]`, valid until the next one is asked for."""


def run_steps(model: LoadedModel, section: PoolSection, source: tuple[int, ...] = ()) -> Iterator[StepLogits]:
    """Read the trial's texts in steps of every kind, over a pool of their own with the settings of `section`.

    `source` is what the encoder reads, if the model has one. All ranks of a model call this together.
    """
    texts = trial_texts(model.vocabulary_size)
    steps = _Steps(replace(model, uses_cuda_graphs=False), section, source)
    alone, text, length = steps.table(), texts.text, _STORED
    for token in text[:length]:
        yield from steps.run("token by token", [(alone, (token,), EMPTY_TREE)])
    chunked, beside, chained, branched = (steps.table() for _ in range(4))
    list(steps.run("", [(beside, texts.neighbor[:5], EMPTY_TREE)]))
    first, second = (chunked, text[:length], EMPTY_TREE), (beside, texts.neighbor[5:], EMPTY_TREE)
    yield from steps.run("in chunks beside another row", [first, second])
    yield from steps.run("in chunks beside another row", [(chunked, text[length:], EMPTY_TREE)])
    list(steps.run("", [(chained, text[:length], EMPTY_TREE), (branched, text[:length], EMPTY_TREE)]))
    yield from steps.run("in a chain", [(chained, (text[length],), TokenTree.chain(text[length + 1 :]))])
    yield from steps.run("in a tree", [(branched, (text[length],), texts.tree)])


class _Steps:
    """Runs steps of a model over a pool of its own."""

    def __init__(self, model: LoadedModel, section: PoolSection, source: tuple[int, ...]) -> None:
        tables = group_layers(model.kv_spec, section).layout.tables
        self._pool = KvPool(model.kv_spec, section, tables * _BLOCKS_PER_TABLE)
        self._runner = ModelRunner(model, self._pool)
        self._stored: dict[int, tuple[int, ...]] = {}
        self._tables: list[Any] = []
        self._source = None
        if source:
            store = SourceStore(self._pool)
            self._source = store.acquire(source, "")
            self._runner.encode([self._source], store)

    def table(self) -> int:
        """A new sequence."""
        self._tables.append(self._pool.new_table())
        self._stored[len(self._tables) - 1] = ()
        return len(self._tables) - 1

    def run(self, kind: str, rows: Sequence[Row]) -> Iterator[StepLogits]:
        """Run rows as one step, commit their tokens, and return what it computed of each token and node."""
        step = [
            ForwardRow(self._tables[sequence], tokens, tree, tuple(range(len(tokens) + len(tree))), source=self._source)
            for sequence, tokens, tree in rows
        ]
        for row in step:
            self._pool.reserve(row.table, row.end)
        found = self._runner.forward(step).float()
        for row in step:
            self._runner.commit(row)
        for logits, text in zip(found, self._selected(rows), strict=True):
            yield StepLogits(kind, text, logits)

    def _selected(self, rows: Sequence[Row]) -> Iterator[tuple[int, ...]]:
        """The text up to each token of the rows. Remembers the tokens that are now committed."""
        for sequence, tokens, tree in rows:
            before = self._stored[sequence]
            self._stored[sequence] = text = (*before, *tokens)
            yield from (text[: length + 1] for length in range(len(before), len(text)))
            yield from ((*text, *tree.path_tokens(node)) for node in range(len(tree)))
