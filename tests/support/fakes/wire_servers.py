"""Scripted servicers on one real server that can move to another port, and fixtures for it."""

# ruff: noqa: N802 - the schema defines the names of the methods

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import (
    UnknownModel,
)
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import BeamScoring, EarlyStopping, SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo, Verdict, VerifyRow
from cluster.wire.channel import open_channel
from cluster.wire.codec.common import decode_sequence_ids
from cluster.wire.codec.draft import decode_draft_rows, encode_proposals
from cluster.wire.codec.opening import decode_open_rows, encode_open_result
from cluster.wire.codec.step import decode_step_batch, encode_step_result
from cluster.wire.codec.target_info import encode_occupancy, encode_target_info
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.server import WireServer
from cluster.wire.target_client import GrpcTarget
from pilotfish.v1 import (
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 10.0
MOST_BYTES = 65536
TARGET = "pilotfish.v1.TargetService"
DRAFT = "pilotfish.v1.DraftService"
GENERATION = "pilotfish.v1.GenerationService"
OPERATIONS = "pilotfish.v1.OperationsService"
INFO = TargetInfo(
    *("tiny", 300, 64, KvLayout(16), KvOccupancy(8, 8), (2,), 1, "float32", "epoch"),
    decoder_start=(0, 5),
    max_source_len=32,
    forced_eos_token_id=0,
    bad_words=((7,), (8, 9)),
    no_repeat_ngram_size=3,
    min_tokens=4,
    beam_scoring=BeamScoring(2.0, EarlyStopping.YES),
)
BATCH = StepBatch((VerifyRow(SequenceId("s"), 2, (1, 2), TokenTree.chain([3])),))
OPENS = (
    OpenRow(SequenceId("s"), (1, 2, 3), SequenceStart(2, SamplingParameters(), "tenant"), SequenceId("parent")),
    OpenRow(SequenceId("t"), (1,), SequenceStart(1, SamplingParameters(), source=(4, 5))),
)
OPENED = OpenResult((2, 0), KvOccupancy(8, 7))
RESULT = StepResult((Verdict(SequenceId("s"), 2, (3, 4), 1),), KvOccupancy(8, 7), 0.5)
ROWS = (DraftRow(SequenceId("s"), 1, (1,), DraftBudget(4, 4)),)
PROPOSALS = (Proposal(SequenceId("s"), 1, TokenTree.chain([2, 3])),)
Request = generation_pb2.GenerateRequest


class StreamServicer:
    """Answers every request of a stream while `hold` is set, or raises `failure`."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.streams = 0
        """Number of open streams."""
        self.requested = asyncio.Event()
        """Set once a request has arrived."""

    async def respond(self, requests: AsyncIterator[Any], reply: Callable[[Any], Message]) -> AsyncIterator[Message]:
        self.streams += 1
        try:
            async for request in requests:
                self.requested.set()
                await self.hold.wait()
                if self.failure is not None:
                    raise self.failure
                yield reply(request)
        finally:
            self.streams -= 1


class ScriptedTarget(StreamServicer, target_pb2_grpc.TargetServiceServicer):
    """A target that returns fixed results, or raises `failure`."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = OPENED
        self.result = RESULT
        self.info = INFO
        self.opens: list[tuple[OpenRow, ...]] = []
        self.steps: list[StepBatch] = []
        self.released: tuple[SequenceId, ...] = ()

    async def Open(self, request: target_pb2.TargetServiceOpenRequest, context: object) -> Message:
        if self.failure is not None:
            raise self.failure
        self.opens.append(decode_open_rows(request))
        return encode_open_result(self.opened)

    def Step(
        self, request_iterator: AsyncIterator[target_pb2.TargetServiceStepRequest], context: object
    ) -> AsyncIterator[Message]:
        return self.respond(request_iterator, self._verify)

    def _verify(self, request: target_pb2.TargetServiceStepRequest) -> Message:
        self.steps.append(decode_step_batch(request))
        return encode_step_result(self.result)

    async def Release(self, request: target_pb2.TargetServiceReleaseRequest, context: object) -> Message:
        self.released = decode_sequence_ids(request.sequence_ids)
        return target_pb2.TargetServiceReleaseResponse(kv=encode_occupancy(INFO.kv))

    async def GetInfo(self, request: target_pb2.TargetServiceGetInfoRequest, context: object) -> Message:
        return encode_target_info(self.info)


class ScriptedDrafter(StreamServicer, draft_pb2_grpc.DraftServiceServicer):
    """A drafter that returns fixed proposals while `hold` is set."""

    def Propose(
        self, request_iterator: AsyncIterator[draft_pb2.DraftServiceProposeRequest], context: object
    ) -> AsyncIterator[Message]:
        return self.respond(request_iterator, self._propose)

    def _propose(self, request: draft_pb2.DraftServiceProposeRequest) -> Message:
        assert decode_draft_rows(request) == ROWS
        return encode_proposals(PROPOSALS)


class ScriptedGeneration(generation_pb2_grpc.GenerationServiceServicer, operations_pb2_grpc.OperationsServiceServicer):
    """A public service that streams `words`, then fails, ends or hangs."""

    def __init__(self) -> None:
        self.words = ["a", "b"]
        self.failure: Exception | None = None
        self.wait = False
        self.asked = asyncio.Event()
        self.freed = asyncio.Event()
        self.calls = 0

    async def Generate(self, request: Request, context: object) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.calls += 1
        self.asked.set()
        try:
            for word in self.words:
                yield generation_pb2.GenerateResponse(delta=generation_pb2.GenerationDelta(text=word))
            if self.failure is not None:
                raise self.failure
            if self.wait:
                await asyncio.Event().wait()
        finally:
            self.freed.set()

    async def Abort(self, request: generation_pb2.AbortRequest, context: object) -> Message:
        return generation_pb2.AbortResponse(aborted=request.request_id == "running")

    async def ListModels(self, request: generation_pb2.ListModelsRequest, context: object) -> Message:
        return generation_pb2.ListModelsResponse(models=[generation_pb2.Model(id="tiny")])

    async def GetModel(self, request: generation_pb2.GetModelRequest, context: object) -> Message:
        raise UnknownModel("model", request.model, "a served model: tiny")

    async def GetMetrics(self, request: operations_pb2.GetMetricsRequest, context: object) -> Message:
        return operations_pb2.GetMetricsResponse(exposition=b"one 1\n", content_type="text/plain")


class ScriptedServer:
    """The three servicers on one server that can be moved to another port."""

    def __init__(self) -> None:
        self.target, self.drafter, self.generator = ScriptedTarget(), ScriptedDrafter(), ScriptedGeneration()
        self.server = WireServer(HOST, 0, max_message_bytes=MOST_BYTES)
        self.port = 0
        self.resolved = 0

    async def open(self) -> None:
        self.server = WireServer(HOST, 0, max_message_bytes=MOST_BYTES)
        self.server.add(TARGET, target_pb2_grpc.add_TargetServiceServicer_to_server, self.target)
        self.server.add(DRAFT, draft_pb2_grpc.add_DraftServiceServicer_to_server, self.drafter)
        self.server.add(GENERATION, generation_pb2_grpc.add_GenerationServiceServicer_to_server, self.generator)
        self.server.add(OPERATIONS, operations_pb2_grpc.add_OperationsServiceServicer_to_server, self.generator)
        self.port = await self.server.start()

    async def move(self) -> None:
        """Start on another port, then stop on this one. In this order the system cannot assign the old port again."""
        old = self.server
        await self.open()
        await old.stop(0.0)

    async def resolve(self) -> str:
        self.resolved += 1
        return f"{HOST}:{self.port}"


@pytest.fixture
async def scripted() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    async with asyncio.timeout(3 * TIMEOUT_SECONDS):
        await scripted.open()
        yield scripted
        await scripted.server.stop(0.0)


@pytest.fixture
async def channel(scripted: ScriptedServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(await scripted.resolve()) as channel:
        yield channel


@pytest.fixture
async def target(scripted: ScriptedServer) -> AsyncIterator[GrpcTarget]:
    client = GrpcTarget(scripted.resolve)
    yield client
    await client.close()


@pytest.fixture
async def drafter(scripted: ScriptedServer) -> AsyncIterator[GrpcDrafter]:
    client = GrpcDrafter(scripted.resolve)
    yield client
    await client.close()


@pytest.fixture
async def client(scripted: ScriptedServer) -> AsyncIterator[GenerationClient]:
    async with GenerationClient(scripted.resolve) as client:
        yield client


async def words(
    client: GenerationClient, received: list[str] | None = None, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[str]:
    """The words of an answer. Words before an error are left in `received`."""
    received = [] if received is None else received
    async for response in client.generate(Request(text="hi"), timeout_seconds):
        received += [response.delta.text]
    return received


async def refusal(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.aio.AioRpcError:
    """The error of a call whose request is raw bytes."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _answer(channel, f"/{method}", data)
    return caught.value


async def _answer(channel: grpc.aio.Channel, path: str, data: bytes) -> object:
    if path.endswith("/Generate"):
        return await channel.unary_stream(path)(data).read()
    if not path.endswith(("/Step", "/Propose")):
        return await channel.unary_unary(path)(data)
    stream = channel.stream_stream(path)()
    await stream.write(data)
    return await stream.read()
