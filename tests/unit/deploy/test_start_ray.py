"""A Ray cluster that cannot be joined is one line, which names the address and the reason."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from types import SimpleNamespace

import grpc
import pytest
from ray._private.services import canonicalize_bootstrap_address

from cluster.core.errors import ConfigurationError
from deploy.network.probe import RAY_METHOD
from deploy.ray import start_ray
from deploy.ray.start_ray import join_ray
from tests.support.terminal import run_command


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own module stays as it is for other tests."""
    monkeypatch.setattr(start_ray, "_log_messages_of_ray", lambda: None)


@pytest.fixture
def unused() -> Iterator[str]:
    """An address at which nothing listens. Its port is taken, so that nobody begins to listen there meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", [("plan",), ("serve", "--set", "draft.method=none")])
def test_a_command_says_that_no_cluster_is_there(
    unused: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PILOTFISH_RAY_ADDRESS", unused)
    monkeypatch.setattr("deploy.commands.serve.raise_on_signals", lambda: None)
    assert run_command(*command, "--set", "cluster.ray_auth=off") == 2
    lines = capsys.readouterr().err.splitlines()
    expected = f"pilotfish: PILOTFISH_RAY_ADDRESS: needed HOST:PORT of a running Ray cluster, found {unused}: "
    assert [line for line in lines if line.startswith("pilotfish: ")] == [f"{expected}Connection refused"]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("Could not find any running Ray instance."), "Could not find any running Ray instance."),
        (RuntimeError("Version mismatch: started with\n    Ray: 2.50"), "Version mismatch: started with Ray: 2.50"),
        (ValueError("Invalid address format: auto"), "Invalid address format: auto"),
    ],
)
def test_what_ray_raises_is_one_line(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ConfigurationError) as refused:
        join_ray("ray://head:10001", demands_token=False)
    assert str(refused.value).endswith(f"found ray://head:10001: {reason}")


def address_of(port: int) -> str:
    """`HOST:PORT` of a server on this machine, as Ray makes it of `127.0.0.1:PORT`."""
    return str(canonicalize_bootstrap_address(f"127.0.0.1:{port}"))


@contextmanager
def silent_service() -> Iterator[str]:
    """The address of a server that accepts connections and answers nothing."""
    with socket.create_server(("", 0)) as server:
        yield address_of(server.getsockname()[1])


@contextmanager
def grpc_service(*methods: str) -> Iterator[str]:
    """The address of a gRPC server with these methods."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
            if handler_call_details.method not in methods:
                return None
            return grpc.unary_unary_rpc_method_handler(lambda request, _: bytes(request))

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler()])
    port = server.add_insecure_port("0.0.0.0:0")
    server.start()
    try:
        yield address_of(port)
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("service", [silent_service, grpc_service], ids=["silent", "another gRPC service"])
@pytest.mark.parametrize("variable", ["PILOTFISH_RAY_ADDRESS", "RAY_ADDRESS"])
def test_another_service_than_ray_is_refused_soon(
    service: Callable[[], AbstractContextManager[str]], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_ray, "_CONNECT_SECONDS", 0.5)
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray waits there for many minutes"))
    with service() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigurationError) as refused:
            join_ray(address if variable == "PILOTFISH_RAY_ADDRESS" else "auto", demands_token=False)
    reason = "what listens there does not answer as Ray's control service (GCS)"
    assert str(refused.value).endswith(f"found {address}: {reason}")


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that Ray is told to join."""
    addresses: list[str] = []
    monkeypatch.setattr("ray.init", lambda address, **_: addresses.append(address))
    return addresses


def test_a_running_ray_is_joined(joined: list[str]) -> None:
    with grpc_service(RAY_METHOD) as address:
        join_ray(address, demands_token=False)
    assert joined == [address]


@contextmanager
def sidecar(address: str) -> Iterator[str]:
    """The address of a proxy in front of a server, whose first bytes come after more than a second."""
    host, _, port = address.rpartition(":")

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)

    def relay(client: socket.socket) -> None:
        time.sleep(1.2)
        with client, socket.create_connection((host, int(port))) as upstream, ThreadPoolExecutor(1) as pool:
            pool.submit(copy, upstream, client)
            copy(client, upstream)

    def accept(server: socket.socket) -> None:
        with suppress(OSError), ThreadPoolExecutor() as pool:
            while True:
                pool.submit(relay, server.accept()[0])

    with ThreadPoolExecutor(1) as pool, socket.create_server(("", 0)) as server:
        pool.submit(accept, server)
        try:
            yield address_of(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)


def test_ray_behind_a_slow_proxy_is_joined(joined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_ray, "_CONNECT_SECONDS", 4.0)
    with grpc_service(RAY_METHOD) as ray_address, sidecar(ray_address) as address:
        join_ray(address, demands_token=False)
    assert joined == [address]


def test_an_open_ray_behind_a_slow_proxy_is_refused(joined: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_ray, "_enable_authentication", lambda: None)
    with grpc_service(RAY_METHOD) as ray_address, sidecar(ray_address) as address:
        context = SimpleNamespace(gcs_address=address)
        monkeypatch.setattr("ray.get_runtime_context", lambda: context)
        with pytest.raises(ConfigurationError, match="needed token authentication, found none"):
            join_ray(address, demands_token=True)
    assert joined == [address]


@pytest.mark.parametrize("address", ["ray://head:10001", "local"])
def test_ray_finds_what_its_variable_names_otherwise_than_by_host_and_port(
    address: str, joined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    join_ray("auto", demands_token=False)
    assert joined == [address]
