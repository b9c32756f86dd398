"""Simulates a cluster under load and measures throughput, latency and idle time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from cluster.core.config.load import load
from cluster.core.errors import Overloaded
from cluster.ingress.router.router import Router
from deploy.simulation.block_memory import BlockMemory
from deploy.simulation.capacity.options import CapacityOptions
from deploy.simulation.capacity.step_times import Times
from deploy.simulation.hashed_model import HashedModel
from deploy.simulation.invariants import Ledger
from deploy.simulation.network import Network
from deploy.simulation.nodes import CoordinatorAddresses, CoordinatorNode, DrafterNode, TargetNode
from deploy.simulation.simulated_drafter import DrafterSkill, SimulatedDrafter
from deploy.simulation.simulated_ingress import HEARTBEAT_SECONDS, SimulatedDirectory, routed
from deploy.simulation.simulated_target import SimulatedTarget, StepRow, TargetStart
from deploy.simulation.virtual_time import now, run_virtual
from deploy.simulation.weather import Fate, Weather
from pilotfish.v1 import generation_pb2

Report = Callable[[float, str], None]

BLOCK_SIZE = 16
VOCABULARY_SIZE = 4096
WARM_UP_SHARE = 0.2
CONTEXT_TOKENS = 1 << 15
DRAFT = "draft"
"""Names of drafters begin so."""
_NO_LIMIT_SECONDS = 1e6
_TICKS = 50
_SETTLE_SECONDS = 5.0


@dataclass(slots=True)
class SimulatedAnswer:
    """One answer, with times in virtual seconds."""

    asked_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0
    first_tokens: int = 0
    """Tokens that arrived together with the first one."""
    steps: int = 0
    is_complete: bool = False


@dataclass(slots=True)
class CapacityRun:
    """What one simulation shows, for the whole cluster. Times are in seconds."""

    gpus: int
    tokens_per_second: float = 0.0
    requests_per_second: float = 0.0
    completed: int = 0
    refused: int = 0
    first_token: dict[str, float] = field(default_factory=dict)
    """Percentiles of the time to the first token."""
    per_token: dict[str, float] = field(default_factory=dict)
    """Percentiles of the time per token after the first."""
    tokens_per_step: float = 0.0
    target_idle: float = 0.0
    """Share of the time in which a target computes nothing."""
    drafter_idle: float = 0.0

    @property
    def per_gpu(self) -> float:
        """Tokens per second of one GPU."""
        return self.tokens_per_second / self.gpus


def simulate_capacity(options: CapacityOptions, times: Times, report: Report, *, drafts: bool = True) -> CapacityRun:
    """Simulate the load. `report` receives the share that is done, and a text."""
    return run_virtual(CapacityCluster(options, times, drafts=drafts and options.has_drafts).measure(report))


class _Distances(Weather):
    """Constant delays. Messages to and from drafters take longer than others."""

    def __init__(self, seconds: float, further_seconds: float) -> None:
        super().__init__(seconds)
        self._far = Fate(seconds + further_seconds)

    def fate(self, source: str, destination: str) -> Fate:
        is_far = source.startswith(DRAFT) or destination.startswith(DRAFT)
        return self._far if is_far else super().fate(source, destination)


class CapacityCluster:
    """Targets with their coordinators, and drafters. Each coordinator uses a share of the drafters."""

    def __init__(self, options: CapacityOptions, times: Times, *, drafts: bool) -> None:
        self._options = options
        self._times = times
        self._drafts = drafts
        self._rng = random.Random(options.seed)
        self._network = Network(_Distances(options.network_delay, options.drafter_delay))
        self._model = HashedModel(VOCABULARY_SIZE)
        self._answers: list[SimulatedAnswer] = []
        self._refused = 0
        self._arrived = 0
        self._delivered: list[tuple[float, int]] = []
        self._configuration = load(
            {},
            {
                "draft.method": "ngram" if drafts else "none",
                "draft.placement": options.placement,
                "draft.controller": options.controller,
                "draft.alternate": "on" if options.alternate else "off",
                "draft.max_nodes": options.max_nodes,
                "draft.max_depth": options.max_nodes,
                "scheduler.max_sequences": options.max_sequences,
                "scheduler.max_step_tokens": 2048,
                "scheduler.max_waiting": 10_000,
            },
        )

    async def measure(self, report: Report) -> CapacityRun:
        """Run for the virtual time of the options."""
        options = self._options
        targets = [self._target(index) for index in range(options.simulated_targets)]
        count = options.simulated_drafters if self._drafts else 0
        drafters = [self._drafter(index) for index in range(count)]
        nodes = [self._coordinator(index, count) for index in range(options.simulated_targets)]
        while not all(node.coordinator.ready for node in nodes):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.001)
        queues = [*(node.compute for node in targets), *(node.compute for node in drafters)]
        directory = SimulatedDirectory()
        beating = asyncio.create_task(_beat(directory, nodes))
        router = routed(self._network, directory.members)
        await asyncio.sleep(0)
        begun = now()
        warm = begun + WARM_UP_SHARE * options.seconds
        load_task = asyncio.create_task(self._load(router))
        busy_before: list[float] = []
        for tick in range(_TICKS):
            await asyncio.sleep(options.seconds / _TICKS)
            if tick + 1 == round(_TICKS * WARM_UP_SHARE):
                busy_before = [queue.busy_seconds for queue in queues]
            report((tick + 1) / _TICKS, f"{len(self._answers)} requests, {now() - begun:.1f} virtual seconds")
        window = now() - warm
        busy = [(queue.busy_seconds - before) / window for queue, before in zip(queues, busy_before, strict=True)]
        load_task.cancel()
        beating.cancel()
        await asyncio.gather(load_task, beating, return_exceptions=True)
        await asyncio.sleep(_SETTLE_SECONDS)
        await asyncio.gather(*(node.process.spawn(node.stop(0.0)) for node in nodes))
        return self._result(warm, window, busy[: len(targets)], busy[len(targets) :])

    async def _load(self, router: Router) -> None:
        options = self._options
        async with asyncio.TaskGroup() as running:
            if options.in_flight:
                for _ in range(max(1, round(options.in_flight * options.share))):
                    running.create_task(self._repeat(router))
                return
            while True:
                await asyncio.sleep(self._rng.expovariate(options.arrivals * options.share))
                running.create_task(self._ask(router))

    async def _repeat(self, router: Router) -> None:
        while True:
            await self._ask(router)

    async def _ask(self, router: Router) -> None:
        answer = SimulatedAnswer(now())
        self._answers.append(answer)
        try:
            async with aclosing(router.generate(self._request(), _NO_LIMIT_SECONDS)) as responses:
                async for response in responses:
                    count = len(response.delta.token_ids)
                    if count:
                        answer.first_at = answer.first_at or now()
                        answer.first_tokens = answer.first_tokens or count
                        answer.last_at = now()
                        answer.tokens += count
                        self._delivered.append((answer.last_at, count))
                    elif response.HasField("finished"):
                        answer.steps = response.finished.usage.target_steps
                        answer.is_complete = True
        except Overloaded as error:
            self._refused += 1
            await asyncio.sleep(error.retry_after_seconds)

    def _request(self) -> generation_pb2.GenerateRequest:
        prompt, answer, spread = self._options.mean_lengths()
        self._arrived += 1
        message = generation_pb2.GenerateRequest(request_id=str(self._arrived))
        length = _length(self._rng, prompt, spread)
        message.token_ids.ids.extend(self._rng.choices(range(VOCABULARY_SIZE), k=length))
        message.sampling.seed = self._arrived
        message.stopping.max_tokens = _length(self._rng, answer, spread)
        message.stopping.ignore_eos = True
        return message

    def _result(self, warm: float, window: float, targets: Sequence[float], drafters: Sequence[float]) -> CapacityRun:
        options = self._options
        done = [answer for answer in self._answers if answer.is_complete and answer.last_at >= warm]
        started = [answer for answer in self._answers if answer.asked_at >= warm and answer.first_at]
        decoding = [answer for answer in done if answer.tokens > answer.first_tokens]
        scale = 1 / options.share
        elsewhere = self._drafts and not self._configuration.draft.is_colocated
        gpus = options.targets * options.ranks + (options.drafters if elsewhere else 0)
        return CapacityRun(
            gpus=gpus,
            tokens_per_second=scale * sum(count for at, count in self._delivered if at >= warm) / window,
            requests_per_second=scale * len(done) / window,
            completed=len(done),
            refused=self._refused,
            first_token=percentiles([answer.first_at - answer.asked_at for answer in started]),
            per_token=percentiles([(one.last_at - one.first_at) / (one.tokens - one.first_tokens) for one in decoding]),
            tokens_per_step=sum(one.tokens for one in done) / max(1, sum(one.steps for one in done)),
            target_idle=1 - sum(targets) / max(1, len(targets)),
            drafter_idle=1 - sum(drafters) / len(drafters) if drafters else 0.0,
        )

    def _target(self, index: int) -> TargetNode:
        memory = BlockMemory(-(-self._options.kv_tokens // BLOCK_SIZE), BLOCK_SIZE)

        def step(rows: Sequence[StepRow]) -> float:
            return self._times.step(rows) + self._times.round_seconds

        start = TargetStart("1", min(CONTEXT_TOKENS, self._options.kv_tokens), self._times.profile())
        own = self._skilled() if self._configuration.draft.is_colocated else None
        target = SimulatedTarget(self._model, memory, step, start, own)
        return TargetNode(self._network, f"target-{index}", target)

    def _drafter(self, index: int) -> DrafterNode:
        return DrafterNode(self._network, f"{DRAFT}-{index}", self._skilled(), math.inf)

    def _skilled(self) -> SimulatedDrafter:
        skill = DrafterSkill(self._options.acceptance, runs_ahead=self._options.ahead)
        return SimulatedDrafter(self._model, skill, self._times.drafter)

    def _coordinator(self, index: int, drafters: int) -> CoordinatorNode:
        own = f"coordinator-{index}"
        used = [f"{DRAFT}-{number}" for number in _share(index, self._options.simulated_targets, drafters)]
        addresses = CoordinatorAddresses(own, f"target-{index}", used, own)
        return CoordinatorNode(self._network, addresses, self._configuration, Ledger())


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th, 90th and 99th percentile; 0 without values."""
    ordered = sorted(values) or [0.0]
    return {f"p{share}": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in (50, 90, 99)}


def _share(index: int, coordinators: int, drafters: int) -> Iterator[int]:
    """The drafters that one coordinator uses."""
    if drafters >= coordinators:
        yield from range(index, drafters, coordinators)
    elif drafters:
        yield index % drafters


async def _beat(directory: SimulatedDirectory, nodes: Sequence[CoordinatorNode]) -> None:
    while True:
        directory.beat(nodes)
        await asyncio.sleep(HEARTBEAT_SECONDS)


def _length(rng: random.Random, mean: float, spread: float) -> int:
    """A length with a lognormal distribution."""
    if spread <= 0:
        return max(1, round(mean))
    sigma = math.sqrt(math.log1p(spread * spread))
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)))
