"""How long steps of a few sizes take, before anybody waits for one: what a controller begins with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

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
"""(rows, tokens): the trees of one sequence, and several sequences with small trees or none."""
REPETITIONS = 3
_GREEDY = SamplingParameters(temperature=0.0)

Decide = Callable[[Sequence[ForwardRow], Sequence[DecisionContext]], object]


def profile_steps(pool: KvPool, decide: Decide) -> tuple[StepSample, ...]:
    """The median time of each size, in seconds, for sequences without a past. Leaves nothing in the pool.

    `decide` computes the rows and decides at every node. On all ranks at once: each takes the same steps, and leaves
    out the same sizes when the pool is too small.
    """
    samples: list[StepSample] = []
    for rows, tokens in SIZES:
        try:
            seconds = [_time(pool, decide, rows, tokens // rows) for _ in range(REPETITIONS)]
        except KvPoolExhausted:
            continue
        samples.append(StepSample(rows, tokens, median(seconds)))
    return tuple(samples)


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
