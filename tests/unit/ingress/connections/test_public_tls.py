"""TLS of both public APIs over real sockets: whom clients trust, certificates of clients, and changed certificates."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from cluster.core.config.load import load
from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.errors import ConfigurationError, PilotfishError
from cluster.wire import tls as wire_tls
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from cluster.wire.tls import CertificateFiles, client_context, server_files
from tests.support.certificates import Authority
from tests.support.fakes.both_apis import HI, BothApis, Request, serving
from tests.support.tls_access import TlsAccess

BODY = {"messages": HI}
TEXT = "hello the world"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def settings(authority: Authority, *, demands: bool = False, presents: bool = False) -> PublicTlsSection:
    certificate, key = authority.issue("server")
    client_certificate, client_key = authority.issue("client") if presents else (None, None)
    return PublicTlsSection(
        certificate=certificate,
        key=key,
        ca=str(authority.file),
        client_ca=str(authority.file) if demands else None,
        client_certificate=client_certificate,
        client_key=client_key,
    )


def chat() -> Request:
    request = Request()
    request.chat.messages.add(role="user", content="hi")
    return request


async def grpc_text(both: BothApis, tls: PublicTlsSection | None) -> str:
    access = PublicAccess() if tls is None else TlsAccess(tls)
    async with GenerationClient(fixed_address(both.grpc_address), access) as client:
        return "".join([response.delta.text async for response in client.generate(chat(), 5.0)])


async def http_text(both: BothApis, context: ssl.SSLContext | bool) -> str:
    async with httpx.AsyncClient(base_url=both.http.base_url, verify=context) as http:
        answer = await http.post("/v1/chat/completions", json=BODY)
        return str(answer.json()["choices"][0]["message"]["content"])


async def test_both_apis_answer_over_tls_and_only_over_tls(tmp_path: Path, authority: Authority) -> None:
    tls = settings(authority)
    async with serving(tmp_path, tls=tls) as both:
        assert both.http.base_url.scheme == "https"
        assert await both.over_http(BODY) == (TEXT, "")
        assert await both.over_grpc(chat()) == (TEXT, "")
        with pytest.raises(PilotfishError):
            await grpc_text(both, None)
        with pytest.raises(httpx.TransportError):
            await httpx.AsyncClient().get(f"http://127.0.0.1:{both.http.base_url.port}/health")


async def test_clients_refuse_a_server_that_their_authority_has_not_signed(
    tmp_path: Path, authority: Authority
) -> None:
    stranger = settings(Authority(tmp_path / "stranger"))
    async with serving(tmp_path, tls=settings(authority)) as both:
        with pytest.raises(PilotfishError):
            await grpc_text(both, PublicTlsSection(ca=stranger.ca))
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http_text(both, client_context(PublicTlsSection(ca=stranger.ca)))


async def test_the_certificate_of_the_server_itself_is_trusted_without_an_authority(
    tmp_path: Path, authority: Authority
) -> None:
    tls = settings(authority).model_copy(update={"ca": None})
    async with serving(tmp_path, tls=tls) as both:
        assert await both.over_http(BODY) == (TEXT, "")
        assert await both.over_grpc(chat()) == (TEXT, "")


async def test_a_client_without_a_certificate_is_refused_where_one_is_demanded(
    tmp_path: Path, authority: Authority
) -> None:
    tls = settings(authority, demands=True, presents=True)
    stranger = settings(Authority(tmp_path / "stranger"), presents=True)
    async with serving(tmp_path, tls=tls) as both:
        assert await both.over_http(BODY) == (TEXT, "")
        assert await both.over_grpc(chat()) == (TEXT, "")
        pair = {"client_certificate": stranger.client_certificate, "client_key": stranger.client_key}
        for other in (PublicTlsSection(ca=tls.ca), PublicTlsSection(ca=tls.ca, **pair)):
            with pytest.raises(httpx.TransportError):
                await http_text(both, client_context(other))
            with pytest.raises(PilotfishError):
                await grpc_text(both, other)
        assert len(both.engine.requests) == 2


async def test_a_changed_certificate_is_presented_without_a_restart(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_tls, "RELOAD_SECONDS", 0.0)
    tls = settings(authority)
    async with serving(tmp_path, tls=tls) as both:
        host, _, port = both.grpc_address.rpartition(":")
        addresses = [(host, int(port)), ("127.0.0.1", both.http.base_url.port or 0)]
        before = [await asyncio.to_thread(presented, address) for address in addresses]
        new = Authority(tmp_path / "authority")
        new.issue("server")
        after = [await asyncio.to_thread(presented, address) for address in addresses]
        assert before[0] == before[1] != after[0] == after[1]
        assert await grpc_text(both, PublicTlsSection(ca=str(new.file))) == TEXT
        assert await http_text(both, client_context(PublicTlsSection(ca=str(new.file)))) == TEXT


def presented(address: tuple[str, int]) -> bytes | None:
    """The certificate that a server presents."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection(address, timeout=5) as plain, context.wrap_socket(plain) as connection:
        return connection.getpeercert(binary_form=True)


def test_files_in_the_middle_of_a_change_leave_the_certificate_as_it_was(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("server")
    seconds = iter(range(0, 100, 2))
    files = CertificateFiles(certificate, key, clock=lambda: float(next(seconds)))
    first = files.read()
    assert files.changed() is None
    other, other_key = authority.issue("other")
    Path(certificate).write_bytes(Path(other).read_bytes())
    assert files.changed() is None
    Path(key).write_bytes(Path(other_key).read_bytes())
    second = files.changed()
    assert second is not None
    assert second.certificate != first.certificate
    Path(key).unlink()
    assert files.changed() is None
    assert "BEGIN" not in repr(second).replace(repr(second.certificate), "")


def test_files_below_the_home_directory_are_found(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tls = settings(authority, presents=True)
    files = {name: f"~/{Path(file).relative_to(tmp_path)}" for name, file in tls if file}
    server_files(tls.model_copy(update=files))
    client_context(tls.model_copy(update=files))


def test_unusable_files_are_refused_by_name(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("server")
    other = authority.issue("other")[1]
    with pytest.raises(ConfigurationError, match=r"server\.tls\.key: needed a readable file"):
        CertificateFiles(certificate, str(tmp_path / "none")).read()
    with pytest.raises(ConfigurationError, match=r"server\.tls\.certificate, server\.tls\.key"):
        CertificateFiles(certificate, other).read()
    with pytest.raises(ConfigurationError, match=r"server\.tls\.client_ca"):
        CertificateFiles(certificate, key, key).read()
    for unknown in (
        lambda: CertificateFiles("~no.body/server.crt", key),
        lambda: client_context(PublicTlsSection(certificate="~no.body/server.crt", key=key)),
    ):
        with pytest.raises(ConfigurationError, match=r"server\.tls\.certificate: needed a known user, found ~no\.body"):
            unknown()
    with pytest.raises(ConfigurationError, match="certificate and key must be set together"):
        load({"server": {"tls": {"certificate": certificate}}})
