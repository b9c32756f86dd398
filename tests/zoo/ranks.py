"""Two ranks of an architecture, compared with one: the same prompts, then a chain beside a tree."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import PilotfishError
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.kept_kernels import kept_kernels
from tests.support.engines.rank_processes import Ranks, running_ranks
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.model.loading import load_model
from workers.model.share import Share
from workers.verify.group import join_group

RANKS = 2
BOUND = 1e-3
"""Largest relative error of a token's logits, both less their mean."""
_REFUSED = f"target.tensor_parallel: {RANKS} is refused, because "
_PROMPTS = (tuple((7 * index) % 90 + 4 for index in range(30)), tuple((11 * index) % 90 + 4 for index in range(17)))
_TREES = (TokenTree.chain([9, 8, 7, 6]), TokenTree((5, 6, 7, 8, 5, 9, 10), (-1, -1, 0, 0, 1, 3, 5)))

Answer = list[list[float]] | str
"""A rank's part of the logits, or why it has none."""


class TwoRanks:
    """Processes of two ranks, which load one model after another. What one of them fails with ends both."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._running = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._running.close()

    def serve(self, directory: Path, max_context_len: int | None = None) -> str:
        """`yes` if two ranks have the logits of one; else why they refuse the model, or how they differ.

        `max_context_len` is that of a model whose configuration states none.
        """
        if self._ranks is None:
            self._ranks = self._running.enter_context(running_ranks(RANKS, _run))
        for pipe in self._ranks.pipes:
            pipe.send((str(directory), max_context_len))
        expected = torch.tensor(_logits(directory, max_context_len, 0, 1))
        answers = [_answer(self._ranks, rank) for rank in range(RANKS)]
        reasons = [answer for answer in answers if isinstance(answer, str)]
        if reasons:
            self._running.close()
            self._ranks = None
            refused = next((one for one in reasons if not one.startswith("DIFFERS")), reasons[0])
            return refused.removeprefix(_REFUSED).removesuffix("; it must be 1")
        found = torch.cat([torch.tensor(answer) for answer in answers], dim=1)
        error = max(relative_error(one, other) for one, other in zip(found, expected, strict=True))
        return "yes" if error <= BOUND else f"DIFFERS: relative error {error:.2g}"


def _answer(ranks: Ranks, rank: int) -> Answer:
    try:
        answer: Answer = ranks.answer(rank)
        return answer
    except TimeoutError:
        return "DIFFERS: a rank does not answer"
    except EOFError:
        return "DIFFERS: a rank ended"


def _run(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    join_group(TargetSection(device="cpu", tensor_parallel=RANKS), rank, "127.0.0.1", port)
    with contextlib.suppress(EOFError, OSError), kept_kernels():
        while True:
            directory, max_context_len = pipe.recv()
            try:
                pipe.send(_logits(Path(directory), max_context_len, rank, RANKS))
            except PilotfishError as error:
                pipe.send(str(error).replace(directory, "…"))
            except Exception as error:  # code of a family may raise anything
                pipe.send(f"DIFFERS: {type(error).__name__}: {' '.join(str(error).split())}"[:200])
    os._exit(0)


@torch.inference_mode()
def _logits(directory: Path, max_context_len: int | None, rank: int, ranks: int) -> list[list[float]]:
    """This rank's part of the logits of two prompts in one step, and of a chain and a tree after them."""
    section = TargetSection(path=str(directory), device="cpu", compile="off", tensor_parallel=ranks)
    model = load_model(section, rank=rank, tensor_parallel=ranks, max_context_len=max_context_len, trial=ranks > 1)
    pool = KvPool(model.kv_spec, section.kv.model_copy(update={"block_size": 4}), 1000)
    runner, source = ModelRunner(model, pool), None
    if model.source is not None:
        store = SourceStore(pool)
        source = store.acquire(tuple(range(4, 21)), "")
        runner.encode([source], store)
    tables, found = [pool.new_table() for _ in _PROMPTS], []
    steps: Sequence[Sequence[tuple[tuple[int, ...], TokenTree]]] = (
        [(prompt, EMPTY_TREE) for prompt in _PROMPTS],
        [((11,), tree) for tree in _TREES],
    )
    for step in steps:
        rows = [
            ForwardRow(table, tokens, tree, tuple(range(len(tokens) + len(tree))), source=source)
            for table, (tokens, tree) in zip(tables, step, strict=True)
        ]
        for row in rows:
            pool.reserve(row.table, row.end)
        found.append(runner.forward(rows).clone().float())
        for row in rows:
            runner.commit(row)
    own = Share(rank, ranks).tokens(model.vocabulary_size)
    return [[float(number) for number in row] for row in torch.cat(found)[:, : own.stop - own.start]]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected| of both less their mean, as Euclidean norms."""
    found, expected = found.double() - found.double().mean(), expected.double() - expected.double().mean()
    return float((found - expected).norm() / expected.norm())
