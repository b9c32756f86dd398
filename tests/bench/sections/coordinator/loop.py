"""Measures what a round costs beside the target's step: coordinator, messages and gRPC, over a target that only waits.

The target answers over a real socket after a fixed time, in this process, so both ends of the wire count. What is left
of a round is the coordinator's loop and the wire. Its readers take every token. Requests that wait must cost nothing.

With `--variants ahead`, whole rounds over an engine that plans and decides for a GPU, which stands still or computes
nothing for the time that a pass took on an H200: with steps launched before their rows come, and without. Coordinator
and engine share one interpreter here: a launch waits whenever the coordinator computes, which it does not in a cluster.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import patch

import uvloop

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.ids import RequestId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import GenerationRequest, SamplingParameters, StoppingCriteria
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo, Verdict
from tests.bench.host_time import host_steps
from tests.bench.options import Options
from tests.bench.report import heading, spread, table, write
from tests.support.fakes.echo_workers import EchoEngine, target_at
from workers.serve.target_servicer import TargetServicer

BATCHES, QUICK_BATCHES = (1, 8, 64, 256), (1, 8)
WAITING, QUICK_WAITING = (0, 10_000), (0, 100)
STEP_SECONDS = 0.02
"""Time of a step, about that of SmolLM2-135M on two cores."""
WARM_UP, ROUNDS, QUICK_ROUNDS = 20, 100, 10
GOAL_SECONDS, GOAL_ROW_SECONDS = 0.3e-3, 10e-6
"""What a round may cost beside its step, and what each of its rows adds."""
PASS_SECONDS = {1: 5.5e-3, 8: 6.1e-3, 64: 10.0e-3}
"""Time of a pass of Llama-3.1-8B on an H200, by rows (`device-h200`)."""
SURE_ROUNDS = 250
"""Rounds after which an engine launches steps ahead."""
_CONTEXT, _BLOCK, _ANSWER = 4096, 16, 1500
_KV = KvOccupancy(1_000_000, 900_000)


class WaitingEngine(EchoEngine):
    """Echoes each row's last token after `STEP_SECONDS`, and records when steps end and how long they take."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self.seconds: list[float] = []

    def step(self, batch: StepBatch) -> StepResult:
        begun = time.perf_counter()
        time.sleep(STEP_SECONDS)
        self.sizes.append(len(batch.rows))
        verdicts = tuple(
            Verdict(row.sequence_id, row.base_len, row.pending[-1:] if row.decide else ()) for row in batch.rows
        )
        self.ends.append(time.perf_counter())
        self.seconds.append(self.ends[-1] - begun)
        return StepResult(verdicts, _KV, self.seconds[-1], 0.0)

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        return OpenResult((0,) * len(rows), _KV)

    def info(self) -> TargetInfo:
        return TargetInfo("echo", 700, _CONTEXT, KvLayout(_BLOCK), _KV, (2,), 1, "float32", "e")


def run(options: Options) -> None:
    """Measure and report."""
    if "ahead" in options.variants:
        _run_ahead(options)
        return
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    heading("Loop and wire: a round over a target that only waits")
    write(f"steps of {STEP_SECONDS * 1e3:.0f} ms")
    rows = []
    for batch in batches:
        for waiting in QUICK_WAITING if options.quick else WAITING:
            found = [_run(_beside_step(options, batch, waiting)) for _ in range(options.repeats)]
            goal = GOAL_SECONDS + GOAL_ROW_SECONDS * batch
            rows.append([str(batch), f"{waiting:,}", spread([1e3 * one for one in found]), f"{1e3 * goal:.2f}"])
    table(["rows", "requests that wait", "round without its step, ms", "goal, ms"], rows)


def _run(measurement: Coroutine[Any, Any, float]) -> float:
    """Run on the event loop that Ray's actors have."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measurement)


async def _beside_step(options: Options, batch: int, waiting: int) -> float:
    """Mean seconds of a round of `batch` rows without its step, while `waiting` further requests wait."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    engine = WaitingEngine()
    configuration = options.configuration(
        "draft.method=none",
        f"scheduler.max_sequences={batch}",
        f"scheduler.max_step_tokens={max(256, 8 * batch)}",
        "scheduler.max_waiting=100000",
    )
    async with (
        target_at(TargetServicer(engine)) as target,
        Coordinator(target, [], configuration, Metrics()) as coordinator,
    ):
        readers = [asyncio.create_task(_read(coordinator, index)) for index in range(batch)]
        await _until(lambda: len(engine.sizes) >= WARM_UP and engine.sizes[-1] == batch)
        readers += [asyncio.create_task(_read(coordinator, batch + index)) for index in range(waiting)]
        await asyncio.sleep(20 * STEP_SECONDS + waiting * 2e-4)  # until all of them wait
        first = len(engine.ends)
        await _until(lambda: len(engine.ends) > first + rounds)
        if set(engine.sizes[first : first + rounds]) != {batch}:
            raise RuntimeError(f"steps had {sorted(set(engine.sizes[first:]))} rows instead of {batch}")
        whole = engine.ends[first + rounds] - engine.ends[first]
        steps = sum(engine.seconds[first + 1 : first + rounds + 1])
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    return (whole - steps) / rounds


def _run_ahead(options: Options) -> None:
    """Measure and report rounds with steps launched ahead, and without, in turn."""
    heading("Loop and wire: rounds with steps launched before their rows come, over a GPU that computes nothing")
    rows = []
    for batch in options.batches or ((1,) if options.quick else PASS_SECONDS):
        found: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.repeats):
            for goes_ahead, seconds in found.items():
                seconds.append(1e3 * _run(_whole_round(options, batch, goes_ahead=goes_ahead)))
        shares = [with_it / without for without, with_it in zip(*found.values(), strict=True)]
        times = (spread(found[False], 2), spread(found[True], 2), spread(shares, 3))
        rows.append([str(batch), f"{1e3 * PASS_SECONDS[batch]:.1f}", *times])
    table(["rows", "pass, ms", "round, ms", "round with steps ahead, ms", "÷"], rows)


async def _whole_round(options: Options, batch: int, *, goes_ahead: bool) -> float:
    """Mean seconds of a round of `batch` rows."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    tokens, ends = batch * (_ANSWER + _BLOCK), list[float]()
    with host_steps(tokens, pass_seconds=PASS_SECONDS[batch], goes_ahead=goes_ahead) as steps:
        step = steps.engine.step

        def timed(rows: StepBatch) -> StepResult:
            result = step(rows)
            if len(rows.rows) == batch:
                ends.append(time.perf_counter())
            return result

        configuration = options.configuration("draft.method=none", f"scheduler.max_sequences={batch}")
        with patch.object(steps.engine, "step", timed):
            async with (
                target_at(TargetServicer(steps.engine)) as target,
                Coordinator(target, [], configuration, Metrics()) as coordinator,
            ):
                readers = [asyncio.create_task(_read(coordinator, index, _ANSWER)) for index in range(batch)]
                await _until(lambda: len(ends) > SURE_ROUNDS + rounds)
                for reader in readers:
                    reader.cancel()
                await asyncio.gather(*readers, return_exceptions=True)
    return (ends[SURE_ROUNDS + rounds] - ends[SURE_ROUNDS]) / rounds


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the engine's thread has no event
        await asyncio.sleep(STEP_SECONDS)


async def _read(coordinator: Coordinator, index: int, tokens: int = _CONTEXT - 8) -> None:
    """Read an answer that does not end while it is measured."""
    sampling, stopping = SamplingParameters(temperature=0.0), StoppingCriteria(max_tokens=tokens)
    request = GenerationRequest(RequestId(f"r{index}"), (5, 6, 7, 8), sampling, stopping, None, "", 1, None)
    async for _ in coordinator.generate(request):
        pass
