"""Internal services answer only callers with the cluster token, over real sockets; mutual TLS is a further demand."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from cluster.core.errors import ConfigurationError, DrafterUnavailable, TargetUnavailable
from cluster.wire import tls as wire_tls
from cluster.wire.connection import fixed_address
from cluster.wire.coordinator_service import CoordinatorServicer
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.peer_access import OPEN, TOKEN_KEY, PeerAccess
from cluster.wire.server import WireServer
from cluster.wire.target_client import GrpcTarget
from deploy.network.cluster_token import draw_token
from pilotfish.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    draft_pb2,
    generation_pb2,
    lease_pb2,
    operations_pb2,
    target_pb2,
)
from tests.support.certificates import make_certificate
from tests.support.fakes.echo_workers import EchoDrafter, EchoEngine
from workers.serve.worker_server import WorkerHost, host_draft, host_target

SECONDS = 30.0
PUBLIC = {"pilotfish.v1.GenerationService", "pilotfish.v1.OperationsService"}


class CoordinatorHost:
    """A server of the coordinator's internal service, which answers nothing."""

    def __init__(self, access: PeerAccess) -> None:
        self._server = WireServer("127.0.0.1", 0, access=access)
        add_to_server = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
        self._server.add("pilotfish.v1.CoordinatorService", add_to_server, CoordinatorServicer(self._nothing))
        self.address = ""

    async def __aenter__(self) -> Self:
        self.address = f"127.0.0.1:{await self._server.start()}"
        await self._server.set_serving("pilotfish.v1.CoordinatorService", serving=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0.0)

    async def _nothing(
        self, _: generation_pb2.GenerateRequest, __: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        for response in ():
            yield response


HOSTS: dict[str, Callable[[PeerAccess], WorkerHost | CoordinatorHost]] = {
    "pilotfish.v1.CoordinatorService": CoordinatorHost,
    "pilotfish.v1.TargetService": lambda access: host_target("127.0.0.1", EchoEngine(), access),
    "pilotfish.v1.DraftService": lambda access: host_draft("127.0.0.1", EchoDrafter(), access),
    "pilotfish.v1.LeaseService": lambda access: host_draft("127.0.0.1", EchoDrafter(), access),
}
"""A server of every internal service."""
FILES = (coordinator_pb2, draft_pb2, generation_pb2, lease_pb2, operations_pb2, target_pb2)
SERVICES: list[ServiceDescriptor] = [each for file in FILES for each in file.DESCRIPTOR.services_by_name.values()]
METHODS = [method for service in SERVICES if service.full_name in HOSTS for method in service.methods]

every_method = pytest.mark.parametrize("method", METHODS, ids=[method.full_name for method in METHODS])


@asynccontextmanager
async def served(service: str, access: PeerAccess) -> AsyncIterator[str]:
    async with HOSTS[service](access) as host, asyncio.timeout(SECONDS):
        yield host.address


async def status_of(
    address: str, method: MethodDescriptor, *tokens: str, message: bytes = b""
) -> tuple[grpc.StatusCode, str]:
    """The status and the details of a call with these tokens in its metadata."""
    while True:
        found = await _status_once(address, method, tokens, message)
        if found != (grpc.StatusCode.INTERNAL, "Internal error from Core"):
            return found
        # A write met the end of the call: grpc.aio then has no status of the server.


async def _status_once(
    address: str, method: MethodDescriptor, tokens: tuple[str, ...], message: bytes
) -> tuple[grpc.StatusCode, str]:
    metadata = [(TOKEN_KEY, token) for token in tokens]
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            if method.client_streaming:
                stream: Any = channel.stream_stream(path)(metadata=metadata)
                with suppress(grpc.aio.AioRpcError):  # the server may have ended the call; reading tells the status
                    await stream.write(message)
                    await stream.done_writing()
                while await stream.read() is not grpc.aio.EOF:
                    pass
            else:
                await channel.unary_unary(path)(message, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def test_every_service_of_the_schemas_is_public_or_hosted_here() -> None:
    schemas = {path.stem for path in Path(target_pb2.__file__).parent.glob("*.proto")}
    assert schemas == {Path(file.DESCRIPTOR.name).stem for file in FILES} | {"common"}
    assert {service.full_name for service in SERVICES} == PUBLIC | set(HOSTS)
    assert len(METHODS) >= 7


@every_method
async def test_a_call_without_the_token_is_refused_without_details(method: MethodDescriptor) -> None:
    async with served(method.containing_service.full_name, PeerAccess(draw_token())) as address:
        assert await status_of(address, method) == (grpc.StatusCode.UNAUTHENTICATED, "")


@every_method
@pytest.mark.parametrize(
    "spoil",
    [
        lambda right: [draw_token().text],
        lambda right: [right[:-1]],
        lambda right: [right + "0"],
        lambda right: [""],
        lambda right: [right, right],
        lambda right: [draw_token().text, right],
    ],
    ids=["another", "shorter", "longer", "empty", "twice", "after another"],
)
async def test_a_call_with_a_wrong_token_is_refused_without_details(
    method: MethodDescriptor, spoil: Callable[[str], list[str]]
) -> None:
    token = draw_token()
    async with served(method.containing_service.full_name, PeerAccess(token)) as address:
        refused = await status_of(address, method, *spoil(token.text))
    assert refused == (grpc.StatusCode.UNAUTHENTICATED, "")


@every_method
async def test_a_message_without_the_token_is_not_parsed(method: MethodDescriptor) -> None:
    token = draw_token()
    async with served(method.containing_service.full_name, PeerAccess(token)) as address:
        unreadable = b"\xff\xff\xff"
        code, _ = await status_of(address, method, token.text, message=unreadable)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        code, _ = await status_of(address, method, message=unreadable)
        assert code is grpc.StatusCode.UNAUTHENTICATED


@every_method
async def test_a_call_with_the_token_reaches_the_service(method: MethodDescriptor) -> None:
    token = draw_token()
    async with served(method.containing_service.full_name, PeerAccess(token)) as address:
        code, _ = await status_of(address, method, token.text)
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)  # an empty message may lack a field


@pytest.mark.parametrize("service", HOSTS)
async def test_health_checks_need_no_token_and_reflection_does(service: str) -> None:
    async with served(service, PeerAccess(draw_token())) as address, grpc.aio.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        assert await listing.code() is grpc.StatusCode.UNAUTHENTICATED


STRANGER = """
import sys, grpc
from pilotfish.v1 import target_pb2, target_pb2_grpc
stub = target_pb2_grpc.TargetServiceStub(grpc.insecure_channel(sys.argv[1]))
try:
    stub.Release(target_pb2.TargetServiceReleaseRequest(sequence_ids=["s"]), timeout=30)
except grpc.RpcError as error:
    print(error.code().name, repr(error.details()))
"""


async def test_a_stranger_process_cannot_release_sequences() -> None:
    engine = EchoEngine()
    async with host_target("127.0.0.1", engine, PeerAccess(draw_token())) as host:
        stranger = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", STRANGER, host.address],
            capture_output=True,
            text=True,
            check=True,
        )
    assert stranger.stdout.split() == ["UNAUTHENTICATED", "''"]
    assert engine.released == []


@pytest.mark.parametrize("access", [OPEN, PeerAccess(draw_token())], ids=["no token", "another token"])
async def test_clients_say_why_they_are_refused(access: PeerAccess) -> None:
    async with served("pilotfish.v1.TargetService", PeerAccess(draw_token())) as address:
        target = GrpcTarget(fixed_address(address), access)
        with pytest.raises(TargetUnavailable, match="another cluster token"):
            await target.info()
        await target.close()
    async with served("pilotfish.v1.DraftService", PeerAccess(draw_token())) as address:
        drafter = GrpcDrafter(fixed_address(address), access)
        with pytest.raises(DrafterUnavailable, match="another cluster token"):
            await drafter.release([])
        await drafter.close()


async def test_with_mutual_tls_only_clients_with_a_certificate_are_served(tmp_path: Path) -> None:
    token = draw_token()
    access = PeerAccess(token, make_certificate(tmp_path / "ours"))
    foreign = PeerAccess(token, make_certificate(tmp_path / "foreign"))
    async with served("pilotfish.v1.TargetService", access) as address:
        target = GrpcTarget(fixed_address(address), access)
        assert (await target.info()).model == "echo"
        await target.close()
        for other in (PeerAccess(token), foreign):
            stranger = GrpcTarget(fixed_address(address), other)
            with pytest.raises(TargetUnavailable):
                await stranger.info()
            await stranger.close()


async def test_changed_certificates_of_internal_services_need_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_tls, "RELOAD_SECONDS", 0.0)
    access = PeerAccess(draw_token(), make_certificate(tmp_path))
    async with served("pilotfish.v1.TargetService", access) as address:
        for _ in range(2):
            target = GrpcTarget(fixed_address(address), access)  # a new channel, which reads the files
            assert (await target.info()).model == "echo"
            await target.close()
            assert make_certificate(tmp_path) == access.tls  # another certificate and authority in the same files


def test_unusable_certificates_of_internal_services_are_named(tmp_path: Path) -> None:
    tls, other = make_certificate(tmp_path / "ours"), make_certificate(tmp_path / "other")
    for change, named in (
        ({"key": other.key}, r"cluster\.tls\.certificate, cluster\.tls\.key: needed a PEM certificate and its key"),
        ({"ca": tls.key}, r"cluster\.tls\.ca: needed PEM certificates"),
        ({"key": str(tmp_path / "none")}, r"cluster\.tls\.key: needed a readable file"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            PeerAccess(tls=tls.model_copy(update=change)).server_credentials()


async def test_mutual_tls_does_not_replace_the_token(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    async with served("pilotfish.v1.TargetService", PeerAccess(draw_token(), tls)) as address:
        target = GrpcTarget(fixed_address(address), PeerAccess(None, tls))
        with pytest.raises(TargetUnavailable, match="another cluster token"):
            await target.info()
        await target.close()
