"""The coordinator: one target, its drafters, and the requests that they serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Self

from cluster.coordinator.admit import AdmissionController
from cluster.coordinator.clients.drafter_pool import DrafterPool
from cluster.coordinator.clients.target import TargetClient
from cluster.coordinator.commit import Committer
from cluster.coordinator.emit import Emitter
from cluster.coordinator.instruments import Instruments
from cluster.coordinator.loop import Loop, Stages
from cluster.coordinator.metrics import Metrics
from cluster.coordinator.observability.traces import NoTracer, RequestTracer
from cluster.coordinator.plan import Planner
from cluster.coordinator.propose import Proposer
from cluster.coordinator.quarantine import Quarantine
from cluster.coordinator.requests.request_table import RequestTable
from cluster.coordinator.verify import Verifier
from cluster.coordinator.wakeup import LoopProgress, Wakeup
from cluster.core.config.model_section import GPU_FRACTION
from cluster.core.config.sections import Configuration
from cluster.core.errors import NotReady
from cluster.core.ids import RequestId
from cluster.core.membership import Load
from cluster.core.ports import Drafter, Target
from cluster.core.request import Commit, GenerationRequest
from cluster.core.verification import TargetInfo

log = logging.getLogger(__name__)

RELEASE_SECONDS = 2.0
"""Longest time for the last releases when the coordinator stops, in seconds."""
HANG_SLACK_SECONDS = 30.0
"""Time without progress above the longest wait for target and drafters after which the loop counts as hung, in seconds.
Far above the delays of a busy machine."""


class Coordinator:
    """Answers requests with one target and its drafters. `start()` connects, `stop()` ends; also a context manager."""

    def __init__(
        self,
        target: Target,
        drafters: Iterable[Drafter],
        configuration: Configuration,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        tracer: RequestTracer | None = None,
    ) -> None:
        limits, draft = configuration.scheduler, configuration.draft
        instruments = Instruments(metrics, clock, tracer or NoTracer())
        wakeup = Wakeup()
        self._metrics = metrics
        self._kv = configuration.target.kv
        self._table = table = RequestTable()
        self._emitter = Emitter(table, instruments, wakeup.notify)
        self._admission = AdmissionController(table, self._emitter, limits, instruments, wakeup.notify)
        step_timeout = configuration.target.step_timeout_seconds
        progress = LoopProgress(clock, step_timeout + draft.timeout_seconds + HANG_SLACK_SECONDS)
        self._target = TargetClient(target, step_timeout, wakeup.notify, progress.mark)
        self._pool = None if draft.is_colocated else DrafterPool(drafters, draft, metrics, clock)
        self._proposer = Proposer.of(self._pool, draft, table.running, limits.max_sequences, instruments)
        quarantine = Quarantine(table, self._emitter.fail, clock)
        stages = Stages(
            self._admission,
            Planner(table, self._target, quarantine, limits, self._proposer.max_draft, instruments),
            self._proposer,
            Verifier(table, self._target, quarantine),
            Committer(table, self._emitter.fail),
            self._emitter,
        )
        self._loop = Loop(stages, table, self._target, wakeup, progress, instruments)
        self._is_draining = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(0.0)

    @property
    def info(self) -> TargetInfo:
        """The description of the target. Raises `NotReady` before `start()` has returned."""
        return self._target.info

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted. False while starting or draining, and after a long loss of the target."""
        return self._loop.is_serving and not self._is_draining

    def check_health(self) -> None:
        """Raise `NotReady` if the loop hangs or has ended unexpectedly. Only a new process can help."""
        self._loop.check_health()

    @property
    def load(self) -> Load:
        """How busy the coordinator and its target are."""
        return Load(self._table.waiting_count, len(self._table.running), self._kv_usage(), self._loop.stalled_seconds)

    def add_drafter(self, name: str, drafter: Drafter) -> None:
        """Use one more drafter. Does nothing if the target drafts. Raises `ValueError` if the name is taken."""
        if self._pool is not None:
            self._pool.join(name, drafter)

    async def remove_drafter(self, name: str) -> None:
        """Use a drafter no more, and return when the calls to it have ended. An unknown one is no error."""
        if self._pool is not None:
            await self._pool.leave(name, RELEASE_SECONDS)

    async def start(self) -> None:
        """Wait for the target without a time limit, then accept requests."""
        await self._target.take_over()
        self._proposer.start(self.info)
        self._metrics.begin(
            self.info.model,
            self.info.is_lossless,
            running=lambda: len(self._table.running),
            waiting=lambda: self._table.waiting_count,
            kv_usage=self._kv_usage,
            cache_config=self._cache_config(),
        )
        if (pool := self._pool) is not None:
            self._metrics.watch_drafters(lambda: pool.drafters)
        self._loop.start()

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, wait up to `drain_seconds` for the accepted ones, end those that are left, and stop."""
        self._is_draining = True
        if not self._loop.is_started:
            return
        try:
            async with asyncio.timeout(drain_seconds):
                await self._table.wait_until_empty()
        except TimeoutError:
            log.warning(_ended_early(len(self._table), drain_seconds))
        await self._loop.stop()
        self._emitter.fail_all(NotReady("the server is shutting down"))
        self._loop.release_ended()
        await asyncio.gather(self._proposer.close(RELEASE_SECONDS), self._target.close(RELEASE_SECONDS))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Commit, None]:
        """Yield the commits of all answers. `Commit.index` is the number of the answer; its last commit has `finish`.

        Closing the generator frees the request's blocks within one step. Raises `NotReady`, `Overloaded` and
        `InvalidRequest` at the first iteration, and `DeadlineExceeded` or `NotReady` later.
        """
        if not self.ready:
            raise NotReady("the server is starting, draining, or without a target")
        live = self._admission.admit(request, self.info)
        try:
            while not live.is_delivered:
                yield await live.receive()
        finally:
            self._emitter.disconnect(live)

    def check_room(self, client: str, request_id: RequestId, answers: int, priority: int = 0) -> None:
        """Raise `Overloaded` if a request of the client would be refused now, before work is spent on its texts."""
        self._admission.check_room(client, request_id, answers, priority)

    def longest_sequence(self, source_len: int) -> int:
        """Return the most tokens of a prompt and its answer together that context and KV memory can hold.

        `source_len` is the number of tokens that an encoder reads, which take memory of their own.
        """
        return self._admission.longest_sequence(source_len, self.info)

    def abort(self, request_id: RequestId) -> bool:
        """End a live request's answers as `ABORT`. Returns whether the request was live."""
        return self._emitter.abort(request_id)

    def conclude(self, request_id: RequestId, index: int = 0) -> bool:
        """End one answer as `STOP`, because its reader found a stop string. No more of it is computed.

        Returns whether the answer was unfinished. A last commit without tokens still ends it in the stream.
        """
        return self._emitter.conclude(request_id, index)

    def count_sent(self, tokens: int) -> None:
        """Count tokens that a reader has sent to its client."""
        self._metrics.sent(tokens)

    def _kv_usage(self) -> float:
        return 1 - self._target.kv.blocks_free / max(1, self._target.kv.blocks_total)

    def _cache_config(self) -> dict[str, object]:
        info, kv = self.info, self._kv
        return {
            "block_size": kv.block_size,
            "cache_dtype": info.dtype if kv.dtype == "auto" else kv.dtype,
            "enable_prefix_caching": kv.prefix_cache,
            "gpu_memory_utilization": kv.memory_fraction or GPU_FRACTION,  # vLLM's default, where it is unset
            "num_gpu_blocks": info.kv.blocks_total,
            "sliding_window": kv.window,
        }


def _ended_early(requests: int, drain_seconds: float) -> str:
    """One sentence for the log about requests that a drain ends."""
    count = "1 request" if requests == 1 else f"{requests} requests"
    if not drain_seconds:
        return f"ended {count} with an error, as told: without a drain"
    return (
        f"ended {count} with an error, not complete after draining for {drain_seconds:g} s; "
        "server.drain_timeout_seconds sets the longest time"
    )
