"""Measures the time of steps of a few sizes at warm-up. The coordinator's latency model starts with these times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.core.errors import KvPoolExhausted
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepSample
from workers.forward.runner import ForwardRow
from workers.kv.pool import KvPool
from workers.sampling.context import DecisionContext, tree_contexts

SIZES = (
    *((1, 1), (1, 2), (1, 4), (1, 8), (1, 10), (1, 16), (1, 32)),
    *((8, 8), (8, 16), (8, 32), (32, 32), (32, 64)),
)
"""(rows, tokens) of the measured steps: one sequence with trees of several sizes, and several sequences."""
REPETITIONS = 3
_NARROW = 16
"""Wider steps are measured once less: they take several times as long, and a target waits for them when it starts."""
_GREEDY = SamplingParameters(temperature=0.0)
_EVERY_KERNEL = (
    SamplingParameters(temperature=0.5),
    SamplingParameters(temperature=0.5, logprobs=1),
    SamplingParameters(temperature=0.5, repetition_penalty=1.1, top_k=2, top_p=0.5, min_p=0.1),
)

Decide = Callable[[Sequence[ForwardRow], Sequence[DecisionContext]], object]


def profile_steps(pool: KvPool, decide: Decide) -> tuple[StepSample, ...]:
    """Measure the shortest time of each size, in seconds, for sequences of one token. Frees all blocks afterwards.

    Other work on the machine only adds time, so all sizes take turns and the shortest time counts. `decide` computes
    the rows and decides at every node. Call this on all ranks at once: each runs the same steps, and skips the same
    sizes when the pool is too small.
    """
    shortest: dict[tuple[int, int], float] = {}
    for repetition in range(REPETITIONS):
        for rows, tokens in SIZES:
            if tokens > _NARROW and repetition == REPETITIONS - 1:
                continue
            try:
                seconds = _time(pool, decide, rows, tokens // rows)
            except KvPoolExhausted:
                continue
            shortest[rows, tokens] = min(seconds, shortest.get((rows, tokens), seconds))
    return tuple(StepSample(rows, tokens, seconds) for (rows, tokens), seconds in shortest.items())


def compile_decisions(pool: KvPool, decide: Decide) -> None:
    """Decide one token in every way that has kernels of its own, so that no request waits for a compiler.

    Frees all blocks afterwards. Call this on all ranks at once.
    """
    for sampling in _EVERY_KERNEL:
        table = pool.new_table()
        try:
            pool.reserve(table, 1)
            decide([ForwardRow(table, (0,), select=(0,))], [DecisionContext(sampling, (0,), 1)])
        except KvPoolExhausted:
            return
        finally:
            pool.release(table)


def _time(pool: KvPool, decide: Decide, rows: int, width: int) -> float:
    tree = TokenTree.chain([0] * (width - 1))
    tables = [pool.new_table() for _ in range(rows)]
    forwards = [ForwardRow(table, (0,), tree, tuple(range(width))) for table in tables]
    contexts = [context for _ in tables for context in tree_contexts(_GREEDY, (0,), 1, tree)]
    try:
        for forward in forwards:
            pool.reserve(forward.table, forward.end)
        begun = time.perf_counter()
        decide(forwards, contexts)
        return time.perf_counter() - begun
    finally:
        for table in tables:
            pool.release(table)
