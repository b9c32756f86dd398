"""The simulated processes of a cluster: targets, drafters, coordinators. Each serves its methods as bytes."""

from __future__ import annotations

import asyncio
from collections import Counter as Sums
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.sections import Configuration
from cluster.core.drafting import Proposal
from cluster.core.ids import SequenceId
from cluster.core.membership import Load, Member, MemberRole
from cluster.generation.service import GenerationService
from cluster.generation.servicer import GenerationServicer
from cluster.generation.text.tokenizer import Tokenizer
from cluster.generation.text.vocabulary import JsonVocabulary
from cluster.wire.codec.common import decode_client, decode_sequence_ids
from cluster.wire.codec.draft import decode_draft_rows, encode_proposals
from cluster.wire.codec.opening import decode_open_rows, encode_open_result
from cluster.wire.codec.step import decode_step_batch, encode_step_result
from cluster.wire.codec.target_info import encode_occupancy, encode_target_info
from deploy.simulation.invariants import Ledger
from deploy.simulation.network import Call, ComputeQueue, Endpoint, Network
from deploy.simulation.remote import RemoteDrafter, RemoteTarget
from deploy.simulation.simulated_drafter import SimulatedDrafter
from deploy.simulation.simulated_target import SimulatedTarget
from deploy.simulation.virtual_time import Process, now
from pilotfish.v1 import draft_pb2, generation_pb2, target_pb2


class TargetNode:
    """The process of a target."""

    def __init__(self, network: Network, address: str, target: SimulatedTarget) -> None:
        self.process = Process(address)
        self.target = target
        self.compute = ComputeQueue()
        unary = {"Step": self._step, "Open": self._open, "Release": self._release, "GetInfo": self._info}
        network.serve(address, Endpoint(self.process, unary))

    async def _step(self, request: bytes, call: Call) -> bytes:
        batch = decode_step_batch(target_pb2.TargetServiceStepRequest.FromString(request))
        target = self.target
        return await self.compute.run(
            call,
            lambda: target.seconds(batch) + target.draft_seconds(batch),
            lambda: encode_step_result(target.step(batch)).SerializeToString(),
        )

    async def _open(self, request: bytes, call: Call) -> bytes:
        rows = decode_open_rows(target_pb2.TargetServiceOpenRequest.FromString(request))
        return await self.compute.run(
            call, lambda: 0.0, lambda: encode_open_result(self.target.open(rows)).SerializeToString()
        )

    async def _release(self, request: bytes, call: Call) -> bytes:
        message = target_pb2.TargetServiceReleaseRequest.FromString(request)

        def release() -> bytes:
            ids = decode_sequence_ids(message.sequence_ids)
            kv = self.target.release_all() if message.all else self.target.release(ids)
            return target_pb2.TargetServiceReleaseResponse(kv=encode_occupancy(kv)).SerializeToString()

        return await self.compute.run(call, lambda: 0.0, release, always=True)

    async def _info(self, request: bytes, call: Call) -> bytes:  # noqa: ARG002 - the request is empty
        return await self.compute.run(
            call, lambda: 0.0, lambda: encode_target_info(self.target.info()).SerializeToString()
        )


class DrafterNode:
    """The process of a drafter, which serves several coordinators."""

    def __init__(self, network: Network, address: str, drafter: SimulatedDrafter, lease_seconds: float) -> None:
        """What a coordinator holds is released when it is silent for `lease_seconds`."""
        self.process = Process(address)
        self.drafter = drafter
        self.compute = ComputeQueue()
        self.answers_stale: Callable[[], bool] = lambda: False
        """Whether the next answer is the one before: a broken drafter."""
        self._lease_seconds = lease_seconds
        self._heard_at: dict[str, float] = {}
        self._latest: dict[str, Proposal] = {}
        network.serve(address, Endpoint(self.process, {"Propose": self._propose, "Release": self._release}))

    async def _propose(self, request: bytes, call: Call) -> bytes:
        message = draft_pb2.DraftServiceProposeRequest.FromString(request)
        client = self._hear(decode_client(message.client))
        rows = decode_draft_rows(message, client)

        def propose() -> bytes:
            proposals = self.drafter.propose(rows)
            if self.answers_stale():
                proposals = tuple(self._latest.get(one.sequence_id, one) for one in proposals)
            self._latest.update((one.sequence_id, one) for one in proposals)
            return encode_proposals(proposals, client).SerializeToString()

        return await self.compute.run(call, lambda: self.drafter.seconds(rows), propose)

    async def _release(self, request: bytes, call: Call) -> bytes:
        message = draft_pb2.DraftServiceReleaseRequest.FromString(request)
        names = decode_sequence_ids(message.sequence_ids, prefix=self._hear(decode_client(message.client)))

        def release() -> bytes:
            self._forget(names)
            return draft_pb2.DraftServiceReleaseResponse().SerializeToString()

        return await self.compute.run(call, lambda: 0.0, release, always=True)

    def expire(self) -> None:
        """Release what silent coordinators hold."""
        for client, heard_at in list(self._heard_at.items()):
            if now() - heard_at >= self._lease_seconds:
                del self._heard_at[client]
                self._forget([name for name in self.drafter.known if name.startswith(client)])

    def _hear(self, client: str) -> str:
        self._heard_at[client] = now()
        return client

    def _forget(self, names: Sequence[SequenceId]) -> None:
        self.drafter.release(names)
        for name in names:
            self._latest.pop(name, None)


@dataclass(frozen=True, slots=True)
class CoordinatorAddresses:
    """The addresses of a coordinator and of its workers."""

    own: str
    target: str
    drafters: Sequence[str]
    client: str
    """The name of this start of the coordinator, and of what it holds on drafters."""


class CoordinatorNode:
    """The process of a coordinator and its public generation service."""

    def __init__(
        self, network: Network, addresses: CoordinatorAddresses, configuration: Configuration, ledger: Ledger
    ) -> None:
        client = addresses.client
        self.process = Process(addresses.own)
        self.metrics = CountedMetrics()
        ports = [RemoteDrafter(network, drafter, client, ledger) for drafter in addresses.drafters]
        remote = RemoteTarget(network, addresses.target, configuration.target.step_timeout_seconds, ledger)
        self.coordinator = Coordinator(remote, ports, configuration, self.metrics, now)
        self._client = client
        self._service = GenerationService(
            self.coordinator, simulated_tokenizer(), configuration.limits, clock=now, created=0
        )
        self._servicer = GenerationServicer(self._service)
        network.serve(addresses.own, Endpoint(self.process, {"Abort": self._abort}, {"Generate": self._generate}))
        self._starting = self.process.spawn(self.coordinator.start())

    async def stop(self, drain_seconds: float) -> None:
        """Stop as `deploy.coordinator_server` does."""
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self.coordinator.stop(drain_seconds)

    def view(self) -> Member:
        """What a heartbeat says of the coordinator."""
        names = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
        waiting, running, kv_usage = (self.metrics.gauges[f"vllm:{name}"]() for name in names)
        load = Load(int(waiting), int(running), kv_usage)
        return Member(MemberRole.TARGET, self._client, self.process.name, "", load)

    async def _abort(self, request: bytes, call: Call) -> bytes:  # noqa: ARG002 - there is nothing to compute
        message = generation_pb2.AbortRequest.FromString(request)
        return b"1" if self._service.abort(message.request_id, message.client) else b""

    async def _generate(self, request: bytes, seconds_left: float) -> AsyncGenerator[bytes, None]:
        message = generation_pb2.GenerateRequest.FromString(request)
        context = _Deadline(now() + seconds_left)
        async with aclosing(self._servicer.Generate(message, context)) as responses:  # type: ignore[arg-type]
            async for response in responses:
                yield response.SerializeToString()


class _Deadline:
    """The part of a gRPC call's context that the servicer reads."""

    def __init__(self, at: float) -> None:
        self._at = at

    def time_remaining(self) -> float:
        return self._at - now()


@cache
def simulated_tokenizer(vocabulary_size: int = 4096) -> Tokenizer:
    """A tokenizer whose token `i` is the text `i` and a space."""
    pieces = {f"{token} ": token for token in range(vocabulary_size)}
    return Tokenizer(JsonVocabulary(tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, "0 "))), str.encode)


class _Series:
    """A counter, gauge or histogram that keeps a sum. Labels other than the model are dropped."""

    def __init__(self, name: str, sums: Sums[str], gauges: dict[str, Callable[[], float]]) -> None:
        self._name = name
        self._sums = sums
        self._gauges = gauges

    @property
    def family(self) -> _Series:
        return self

    current = family

    def labels(self, *_: object) -> _Series:
        return self

    def inc(self, amount: float = 1.0) -> None:
        self._sums[self._name] += amount  # type: ignore[assignment]  # Counter is declared for integers

    observe = inc

    def set(self, value: float) -> None:
        self._sums[self._name] = value  # type: ignore[assignment]

    def set_function(self, function: Callable[[], float]) -> None:
        self._gauges[self._name] = function


class CountedMetrics(Metrics):
    """The coordinator's metrics as sums by name: Prometheus' own are too slow for thousands of coordinators."""

    def __init__(self) -> None:
        self.sums: Sums[str] = Sums()
        self.gauges: dict[str, Callable[[], float]] = {}
        """Functions that return the present value."""
        super().__init__()

    def _gauge(self, name: str, text: str, *labels: str) -> Any:  # noqa: ARG002 - the base class's signature
        return _Series(name, self.sums, self.gauges)

    def _counter(self, name: str, text: str) -> Any:  # noqa: ARG002
        return _Series(name, self.sums, self.gauges)

    def _labelled_counter(self, name: str, text: str, label: str) -> Any:  # noqa: ARG002
        return _Series(name, self.sums, self.gauges)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Any:  # noqa: ARG002
        return _Series(name, self.sums, self.gauges)
