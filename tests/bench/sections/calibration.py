"""What `pilotfish simulate capacity` predicts beside what the real cluster does, at several loads.

The simulator gets the times of single steps and proposals, measured on the same target without a coordinator. The time
of a round beyond them is fitted to plain decoding of one request. Every other figure is a prediction.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.target_client import GrpcTarget
from deploy.implied_settings import NOT_LOSSLESS
from deploy.simulation.capacity.capacity_run import CapacityRun, simulate_capacity
from deploy.simulation.capacity.options import CapacityOptions
from deploy.simulation.capacity.step_times import MeasuredTimes, of_measured
from deploy.simulation.simulated_target import StepRow
from tests.bench import drafting
from tests.bench.client import Answers, ask_all
from tests.bench.options import Options
from tests.bench.processes import clusters
from tests.bench.report import heading, percentile, table, write

LOADS, QUICK_LOADS = ((1, False), (2, False), (4, False), (8, False), (1, True), (4, True)), ((1, False), (1, True))
"""(requests in flight, with drafts)."""
ACCEPTANCE, NODES = 0.7, 4
PROMPT_TOKENS = 96
ROWS, WIDTHS, PREFILLS = (1, 2, 4, 8), (1, 1 + NODES), (2, 4, 8, 10, 20, 40, 96, 192)
"""Sequences, tokens of each, and tokens of steps of one sequence: equal sums show what a sequence costs."""
REPETITIONS = 7
SIMULATED_SECONDS = 30.0
_GREEDY = SamplingParameters(temperature=0.0)


def run(options: Options) -> None:
    """Measure, simulate and compare."""
    heading("Calibration: the capacity simulation beside the real cluster")
    base = _configuration(options)
    prompts = [options.long_prompt(PROMPT_TOKENS, which) for which in range(2 * max(load for load, _ in LOADS))]
    loads = QUICK_LOADS if options.quick else LOADS
    with ExitStack() as stack:
        target = stack.enter_context(clusters.target(base, clusters.all_cores()))
        cluster = clusters.start_cluster(stack, base, target)
        drafting.warm(cluster, prompts, options.tokens, (1, 4))
        times = asyncio.run(_measured(target.address, cluster.draft.address, prompts[0]))
        found = [(*load, _serve(cluster.coordinator.address, prompts, options.tokens, *load)) for load in loads]
    plain = of_measured(times).step([StepRow(PROMPT_TOKENS, 1)])
    round_seconds = max(0.0, _per_token(found[0][2], 0.5) - plain)
    times = times.model_copy(update={"round_seconds": round_seconds})
    write(
        f"{base.target.served_name}, {base.target.dtype}; {PROMPT_TOKENS} prompt tokens, {options.tokens} of an answer"
    )
    write(f"one plain step {1e3 * plain:.1f} ms, a round beyond it {1e3 * round_seconds:.1f} ms (fitted), ")
    write(
        "steps, rows × tokens: "
        + ", ".join(f"{rows} × {tokens // rows}: {1e3 * s:.0f} ms" for rows, tokens, s in times.steps)
    )
    write(f"drafts: {NODES} tokens, synthetic acceptance {ACCEPTANCE:g}. {NOT_LOSSLESS}.")
    _report([(load, drafts, real, _predict(times, load, drafts, options.tokens)) for load, drafts, real in found])


def _configuration(options: Options) -> Configuration:
    return options.based_on(
        "target.kv.prefix_cache=false",
        "target.kv.pool_bytes=1610612736",
        "scheduler.max_sequences=32",
        "draft.method=synthetic",
        f"draft.synthetic.acceptance=[{ACCEPTANCE}]",
        f"draft.max_nodes={NODES}",
        f"draft.max_depth={NODES}",
    )


def _serve(address: str, prompts: Sequence[Sequence[int]], tokens: int, load: int, drafts: bool) -> Answers:
    chosen = [*prompts[: max(4, 2 * load)]]
    return asyncio.run(ask_all(address, chosen, tokens, load, max_draft_tokens=None if drafts else 0))


def _predict(times: MeasuredTimes, load: int, drafts: bool, tokens: int) -> CapacityRun:
    options = CapacityOptions(
        targets=1,
        drafters=1,
        in_flight=load,
        lengths=f"{PROMPT_TOKENS}:{tokens}:0",
        acceptance=ACCEPTANCE,
        max_nodes=NODES,
        max_sequences=32,
        network_delay=0.0,
        seconds=SIMULATED_SECONDS,
    )
    return simulate_capacity(options, of_measured(times), lambda _, __: None, drafts=drafts)


# --- times of single steps and proposals -------------------------------------------------------


async def _measured(target_address: str, draft_address: str, prompt: Sequence[int]) -> MeasuredTimes:
    """Measure steps of several sizes, and proposals, through the same clients that a coordinator uses."""
    target, drafter = GrpcTarget(fixed_address(target_address)), GrpcDrafter(fixed_address(draft_address))
    try:
        prefills = [(1, count, await _prefill(target, count, prompt)) for count in PREFILLS]
        sizes = [(rows, width) for rows in ROWS for width in WIDTHS]
        steps = [(rows, rows * width, await _decode(target, rows, width, prompt)) for rows, width in sizes]
        call = await _propose(drafter, prompt)
    finally:
        await target.close()
        await drafter.close()
    return MeasuredTimes(steps=(*prefills, *steps), draft_call_seconds=call)


async def _prefill(target: GrpcTarget, count: int, prompt: Sequence[int]) -> float:
    tokens = (tuple(prompt) * (1 + count // len(prompt)))[:count]
    seconds: list[float] = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        await target.step(StepBatch((VerifyRow(SequenceId("p"), count, tokens, start=SequenceStart(count, _GREEDY)),)))
        seconds.append(time.perf_counter() - begun)
        await target.release([SequenceId("p")])
    return statistics.median(seconds)


async def _decode(target: GrpcTarget, rows: int, width: int, prompt: Sequence[int]) -> float:
    """Median time of a step of `rows` sequences with `width - 1` drafted tokens each."""
    tokens = {SequenceId(f"d{row}"): list(prompt) for row in range(rows)}
    for name, stored in tokens.items():
        row = VerifyRow(name, len(stored), tuple(stored), start=SequenceStart(len(stored), _GREEDY))
        stored.extend((await target.step(StepBatch((row,)))).verdicts[0].tokens)
    seconds: list[float] = []
    for _ in range(REPETITIONS):
        tree = TokenTree.chain([0] * (width - 1)) if width > 1 else EMPTY_TREE
        batch = StepBatch(tuple(VerifyRow(name, len(all_), (all_[-1],), tree) for name, all_ in tokens.items()))
        begun = time.perf_counter()
        result = await target.step(batch)
        seconds.append(time.perf_counter() - begun)
        for verdict in result.verdicts:
            tokens[verdict.sequence_id].extend(verdict.tokens)
    await target.release(list(tokens))
    return statistics.median(seconds)


async def _propose(drafter: GrpcDrafter, prompt: Sequence[int]) -> float:
    name, tokens = SequenceId("q"), list(prompt)
    start: SequenceStart | None = SequenceStart(len(tokens), _GREEDY)
    seconds: list[float] = []
    new = tuple(tokens)
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        await drafter.propose((DraftRow(name, len(tokens), new, DraftBudget(NODES, NODES), start),), 10.0)
        seconds.append(time.perf_counter() - begun)
        tokens.append(0)
        new, start = (0,), None
    await drafter.release([name])
    return statistics.median(seconds)


# --- the comparison ----------------------------------------------------------------------------


def _report(found: Sequence[tuple[int, bool, Answers, CapacityRun]]) -> None:
    rows: list[list[str]] = []
    errors: list[float] = []
    for load, drafts, real, predicted in found:
        first = percentile([answer.first_token_seconds for answer in real.each], 0.5)
        pairs = (
            (real.rate, predicted.tokens_per_second, 1.0),
            (first, predicted.first_token["p50"], 1e3),
            (_per_token(real, 0.5), predicted.per_token["p50"], 1e3),
        )
        cells = [
            f"{scale * guess:.1f} / {scale * value:.1f} ({guess / value - 1:+.0%})" for value, guess, scale in pairs
        ]
        errors.append(abs(predicted.tokens_per_second / real.rate - 1))
        rows.append(["drafts" if drafts else "plain", str(load), *cells])
    table(("", "in flight", "tokens/s", "TTFT p50, ms", "TPOT p50, ms"), rows)
    write("predicted / measured (error); tokens of plain decoding of one request are fitted")
    write(f"error of tokens/s: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def _per_token(answers: Answers, share: float) -> float:
    return percentile(
        [answer.decoding_seconds / (len(answer.tokens) - answer.first_tokens) for answer in answers.each], share
    )
