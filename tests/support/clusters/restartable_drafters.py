"""A cluster in this process whose target and drafters can be stopped and started again while requests run.

Target, drafters and coordinator are the real ones and communicate over gRPC.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from cluster.core.config.sections import Configuration
from cluster.core.errors import DrafterUnavailable, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.request import SamplingParameters
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from cluster.wire.codec.common import encode_sampling
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from deploy.implied_settings import with_implied_settings
from pilotfish.v1 import common_pb2, generation_pb2
from workers.draft.registry import create
from workers.serve.target_servicer import StepEngine
from workers.serve.worker_server import WorkerHost, host_draft, host_target
from workers.verify.build import build_engine

LOOPBACK = "127.0.0.1"
TIMEOUT_SECONDS = 300.0
"""Far above the duration of any test on a busy machine, in seconds."""


@dataclass(frozen=True)
class SamplingCase:
    """A request with any sampling parameters. Its prompt repeats itself, so that prompt lookup finds drafts."""

    number: int
    sampling: SamplingParameters
    max_tokens: int
    vocabulary_size: int
    max_draft_tokens: int | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """A random phrase followed by its beginning. Each number has a different length."""
        draw = random.Random(self.number)
        phrase = [draw.randrange(3, self.vocabulary_size) for _ in range(3 + 2 * self.number)]
        return tuple(phrase + phrase[: self.number])

    def message(self) -> generation_pb2.GenerateRequest:
        """The gRPC request."""
        return generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=self.prompt),
            sampling=encode_sampling(self.sampling),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.max_tokens, ignore_eos=True),
            max_draft_tokens=self.max_draft_tokens,
        )


@dataclass(frozen=True)
class FullAnswer:
    """An answer with everything that the server reports about it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    drafted: int
    accepted: int
    lossy: bool


@dataclass
class RestartableDrafter:
    """A drafter that can be stopped and restarted. After a restart it has another port and no sequences."""

    configuration: Configuration
    host: WorkerHost | None = None
    starts: int = 0

    async def resolve(self) -> str:
        """Return the drafter's address. Raises `DrafterUnavailable` while the drafter is stopped."""
        if self.host is None:
            raise DrafterUnavailable("the drafter is stopped")
        return self.host.address

    async def start(self) -> None:
        """Build a new drafting method and listen."""
        method = await asyncio.to_thread(create, self.configuration.draft, self.configuration.target)
        host = host_draft(LOOPBACK, method)
        await host.start()
        self.host, self.starts = host, self.starts + 1

    async def stop(self) -> None:
        """Close its port at once."""
        host, self.host = self.host, None
        if host is not None:
            await host.stop()


class MortalEngine:
    """An engine that answers a number of steps and then none, as if its process were killed in the next one."""

    def __init__(self, engine: StepEngine, steps: int | None, killed: Callable[[], None]) -> None:
        """`steps`: `None` if it lives on. `killed` is called once, in the engine's thread."""
        self._engine = engine
        self._steps = steps
        self._killed = killed
        self.accepted = 0
        """Drafted tokens that it has accepted."""

    def step(self, batch: StepBatch) -> StepResult:
        if self._steps == 0:
            self._killed()
        if self._steps is not None:
            self._steps -= 1
            if self._steps < 0:
                raise TargetUnavailable("the target is killed")
        result = self._engine.step(batch)
        self.accepted += sum(verdict.accepted for verdict in result.verdicts)
        return result

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        return self._engine.open(rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        return self._engine.release(sequence_ids)

    def info(self) -> TargetInfo:
        return self._engine.info()

    def close(self) -> None:
        self._engine.close()


@dataclass
class RestartableTarget:
    """A target, with the drafting method if it drafts itself. A restart loses all sequences."""

    configuration: Configuration
    build: Callable[[Configuration], StepEngine]
    """Builds an engine, in another thread."""
    host: WorkerHost | None = None
    steps: int | None = None
    """After so many steps, the engine that starts next is killed; `None`: it is not."""
    engines: list[MortalEngine] = field(default_factory=list)
    """The engine of each start."""
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an engine is killed."""

    async def resolve(self) -> str:
        """Return the target's address. Raises `TargetUnavailable` while the target is stopped."""
        if self.host is None:
            raise TargetUnavailable("the target is stopped")
        return self.host.address

    async def start(self) -> None:
        """Build a new engine and listen."""
        engine = await asyncio.to_thread(self.build, self.configuration)
        loop, steps = asyncio.get_running_loop(), self.steps
        self.steps = None
        self.engines.append(MortalEngine(engine, steps, lambda: loop.call_soon_threadsafe(self.killed.set)))
        host = host_target(LOOPBACK, self.engines[-1])
        await host.start()
        self.host = host

    async def stop(self) -> None:
        """Close its port at once."""
        host, self.host = self.host, None
        if host is not None:
            await host.stop()


@dataclass
class RestartableCluster:
    """A running cluster, its drafters, and a client of it."""

    address: str
    client: GenerationClient
    target: RestartableTarget
    drafters: list[RestartableDrafter] = field(default_factory=list)

    async def answer_all(self, cases: Sequence[SamplingCase]) -> list[FullAnswer]:
        """The answers to all requests, which are sent at the same time."""
        return list(await asyncio.gather(*(_answer(self.client, case) for case in cases)))

    async def restart_drafters(self, draw: random.Random) -> None:
        """Stop and start a random drafter again and again, until cancelled."""
        while True:
            drafter = draw.choice(self.drafters)
            await asyncio.sleep(draw.uniform(0.02, 0.15))
            await drafter.stop()
            await asyncio.sleep(draw.uniform(0.0, 0.1))
            await drafter.start()

    async def answer_before_during_and_after_a_restart(
        self, cases: Sequence[SamplingCase]
    ) -> tuple[list[FullAnswer], list[FullAnswer], list[FullAnswer]]:
        """The answers to all requests, three times. The target restarts in the middle of the second time."""
        before = await self.answer_all(cases)
        running = asyncio.create_task(self.answer_all(cases))
        await asyncio.sleep(0.1)
        await self.target.stop()
        await self.target.start()
        return before, await running, await self.answer_all(cases)

    async def answer_while_drafters_restart(
        self, cases: Sequence[SamplingCase], draw: random.Random, restarts: int
    ) -> list[list[FullAnswer]]:
        """The answers to all requests, again and again until so many drafters have restarted at random.

        At the end all drafters run.
        """
        restarting = asyncio.create_task(self.restart_drafters(draw))
        answers: list[list[FullAnswer]] = []
        while sum(drafter.starts - 1 for drafter in self.drafters) < restarts:
            if restarting.done():
                restarting.result()  # raises the exception that ended the task
            answers.append(await self.answer_all(cases))
        restarting.cancel()
        await asyncio.gather(restarting, return_exceptions=True)
        for drafter in self.drafters:
            if drafter.host is None:
                await drafter.start()
        return answers

    async def answer_once_drafts_are_accepted(self, case: SamplingCase) -> FullAnswer:
        """The first answer with an accepted draft, or the hundredth one."""
        for _ in range(100):
            answer = await _answer(self.client, case)
            if answer.accepted:
                break
            await asyncio.sleep(0.05)
        return answer


def build_alone(configuration: Configuration) -> StepEngine:
    """The engine of a target with one rank, and the drafting method if it drafts itself."""
    draft, target = configuration.draft, configuration.target
    return build_engine(target, method=create(draft, target) if draft.is_colocated else None)


@asynccontextmanager
async def restartable_cluster(
    configuration: Configuration,
    steps: int | None = None,
    build: Callable[[Configuration], StepEngine] = build_alone,
) -> AsyncIterator[RestartableCluster]:
    """A cluster whose drafters run. Model paths in the configuration are local directories.

    The target, which `build` builds at each start, is killed after `steps` of its steps, unless that is `None`, and
    stays so until the caller restarts it.
    """
    configuration = with_implied_settings(configuration)
    async with AsyncExitStack() as stack:
        restartable = RestartableTarget(configuration, build, steps=steps)
        await restartable.start()
        stack.push_async_callback(restartable.stop)
        target = GrpcTarget(restartable.resolve)
        stack.push_async_callback(target.close)
        count = 0 if configuration.draft.is_colocated else configuration.draft.replicas
        drafters = [RestartableDrafter(configuration) for _ in range(count)]
        clients: list[GrpcDrafter] = []
        for drafter in drafters:
            await drafter.start()
            stack.push_async_callback(drafter.stop)
            clients.append(GrpcDrafter(drafter.resolve))
            stack.push_async_callback(clients[-1].close)
        coordinator = CoordinatorServer(configuration, target, clients)
        stack.push_async_callback(coordinator.stop, 0.0)
        address = f"{LOOPBACK}:{await coordinator.start()}"
        await coordinator.wait_until_ready()
        client = GenerationClient(fixed_address(address))
        stack.push_async_callback(client.close)
        yield RestartableCluster(address, client, restartable, drafters)


async def _answer(client: GenerationClient, case: SamplingCase) -> FullAnswer:
    tokens: list[int] = []
    logprobs: list[float] = []
    lossy: set[bool] = set()
    usage = generation_pb2.Usage()
    async for response in client.generate(case.message(), TIMEOUT_SECONDS):
        tokens.extend(response.delta.token_ids)
        logprobs.extend(entry.logprob for entry in response.delta.logprobs)
        lossy.add(response.lossy)
        usage.MergeFrom(response.finished.usage)
    assert len(lossy) == 1
    return FullAnswer(tuple(tokens), tuple(logprobs), usage.drafted_tokens, usage.accepted_draft_tokens, lossy.pop())
