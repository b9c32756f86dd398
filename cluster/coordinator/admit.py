"""Admit: check a request against the bounds, refuse it when the queue is full, or put it into the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.coordinator.emit import Emitter
from cluster.coordinator.instruments import Instruments
from cluster.coordinator.requests.beam_search import BeamSearch
from cluster.coordinator.requests.decoding_strategy import DecodingStrategy, ParallelSampling
from cluster.coordinator.requests.delivery import Delivery
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable
from cluster.core.config.sections import SchedulerSection
from cluster.core.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded
from cluster.core.fair_queue import displaced, flow_of, outranked
from cluster.core.ids import RequestId
from cluster.core.kv import check_fits
from cluster.core.request import GenerationRequest
from cluster.core.verification import TargetInfo


class AdmissionController:
    """Admits requests to the bounded queue, and ends them at their deadlines."""

    def __init__(
        self,
        table: RequestTable,
        emitter: Emitter,
        limits: SchedulerSection,
        instruments: Instruments,
        on_change: Callable[[], None],
    ) -> None:
        self._table = table
        self._emitter = emitter
        self._limits = limits
        self._metrics = instruments.metrics
        self._clock = instruments.clock
        self._tracer = instruments.tracer
        self._on_change = on_change
        self._delivery = Delivery()
        self._arrivals = 0

    def admit(self, request: GenerationRequest, info: TargetInfo) -> LiveRequest:
        """Put a request into the queue.

        Raises `InvalidRequest`, `Overloaded` when the queue is full, and `DeadlineExceeded` when the deadline passed.
        """
        self._check(request, info)
        strategy = _strategy(request, info)
        now = self._clock()
        if request.deadline is not None and request.deadline <= now:
            raise DeadlineExceeded("the deadline passed before the request arrived")
        flow = flow_of(request.client, request.request_id)
        for request_id in self._in_the_way(flow, strategy.slots, request.priority):
            displaced_one = self._table.find(request_id)
            if displaced_one is not None:
                self._emitter.fail(displaced_one, self._overloaded())
        live = LiveRequest(request, strategy, self._arrivals, now, self._delivery)
        self._arrivals += strategy.slots
        if request.deadline is not None:
            # The deadline has its own timer, because the loop may be waiting for a target that hangs.
            timer = asyncio.get_running_loop().call_later(request.deadline - now, self._expire, live)
            live.set_deadline_timer(timer)
        self._table.add(live)
        self._metrics.admitted(request)
        self._tracer.begin(live)
        self._on_change()
        return live

    def check_room(self, client: str, request_id: RequestId, answers: int, priority: int = 0) -> None:
        """Raise `Overloaded` if the queue is full for a request that has not been tokenized yet."""
        self._in_the_way(flow_of(client, request_id), answers, priority)

    def _in_the_way(self, flow: str, slots: int, priority: int) -> tuple[RequestId, ...]:
        """Return the waiting requests that a new one displaces. Raises `Overloaded` if it must not."""
        excess = self._table.slots + slots - self._limits.max_sequences - self._limits.max_waiting
        if excess <= 0:
            return ()
        if self._limits.policy == "priority":
            found = outranked(self._table.queued(), priority, excess)
        else:
            found = displaced(self._table.queued(), flow, slots, excess)
        if not found:
            raise self._overloaded()
        return found

    def _overloaded(self) -> Overloaded:
        seconds_per_sequence = self._emitter.mean_request_seconds / self._limits.max_sequences
        return Overloaded(f"the queue of {self._limits.max_waiting} sequences is full", max(1.0, seconds_per_sequence))

    def fail_misfits(self, info: TargetInfo) -> None:
        """End requests that no longer fit because the target restarted smaller. They would block the queue."""
        for live in self._table:
            try:
                self._check_fits(live.request, info)
            except InvalidRequest as error:
                self._emitter.fail(live, NotReady(f"the target restarted with less capacity: {error}"))

    def _check(self, request: GenerationRequest, info: TargetInfo) -> None:
        """Refuse a request that can never be served. Raises `InvalidRequest`."""
        self._check_fits(request, info)
        if request.priority and self._limits.policy != "priority":
            bound = f"0: the server's scheduler.policy is {self._limits.policy}"
            raise InvalidRequest("priority", request.priority, bound)
        most = self._limits.max_sequences
        width = 1 if request.beam is None else request.beam.width
        bound = f"between 1 and {most}: the server computes {most} sequences at a time"
        for field, value in (("n", request.n), ("beam.width", width)):
            if not 1 <= value <= most:
                raise InvalidRequest(field, value, bound)
        if not request.open_answers:
            raise InvalidRequest("resumed", request.n, "at least one answer that is not finished")
        if request.beam is not None and request.n > width:
            raise InvalidRequest("n", request.n, f"at most the beam width of {width}")
        if self._table.find(request.request_id) is not None:
            raise InvalidRequest("request_id", request.request_id, "different from those of running requests")

    def _check_fits(self, request: GenerationRequest, info: TargetInfo) -> None:
        context, sourced = info.max_context_len, len(request.source)
        least = int(info.is_encoder_decoder)
        if not least <= sourced <= info.max_source_len:
            bound = f"between {least} and {info.max_source_len} tokens, as {info.model} reads"
            raise InvalidRequest("source", f"{sourced} tokens", bound)
        check_fits(len(request.prompt), request.stopping.max_tokens, context, self.longest_sequence(sourced, info))

    def longest_sequence(self, source_len: int, info: TargetInfo) -> int:
        """Return the most tokens that context and KV memory can hold beside a source of `source_len` tokens."""
        blocks = info.kv.blocks_total - info.layout.held(source_len)
        return info.layout.longest(max(0, blocks), self._limits.max_step_tokens, info.max_context_len)

    def _expire(self, live: LiveRequest) -> None:
        tokens = live.token_count
        self._emitter.fail(live, DeadlineExceeded(f"the deadline passed after {tokens} tokens of the answer"))


def _strategy(request: GenerationRequest, info: TargetInfo) -> DecodingStrategy:
    if request.beam is None:
        return ParallelSampling(request)
    return BeamSearch(request, request.beam, info.vocabulary_size)
