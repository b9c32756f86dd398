"""Addresses, TLS and API keys: how channels are opened, and what every call presents."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from pilotfish.v1 import generation_pb2_grpc

_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # a Generate call must not run twice
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
DEFAULT_MESSAGE_BYTES = 64 << 20
DEFAULT_TIMEOUT_SECONDS = 600.0
DEFAULT_PATIENCE_SECONDS = 10.0
SHORT_CALL_SECONDS = 30.0
"""Timeout of calls that generate nothing, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files and names for TLS. Without `ca`, the authorities of the system are trusted."""

    ca: str | Path | None = None
    """Certificates of the authorities that may sign the server's certificate, in PEM."""
    certificate: str | Path | None = None
    """The client's own certificate, for mutual TLS."""
    key: str | Path | None = None
    """The key of the client's certificate."""
    server_name: str | None = None
    """The name that the server's certificate must have instead of its address."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key: needed both or neither, found one")

    def credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a channel. Raises `OSError` for a file that cannot be read."""
        return grpc.ssl_channel_credentials(
            _read("ca", self.ca), _read("key", self.key), _read("certificate", self.certificate)
        )


@dataclass(frozen=True, slots=True)
class Access:
    """How servers are reached."""

    addresses: tuple[str, ...]
    """Addresses as `host:port`, of servers that serve the same."""
    api_key: str | None = field(repr=False)
    tls: Tls | None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    @property
    def options(self) -> tuple[tuple[str, int | str], ...]:
        """The options of every channel."""
        options = (*_OPTIONS, ("grpc.max_receive_message_length", DEFAULT_MESSAGE_BYTES))
        if self.tls is not None and self.tls.server_name is not None:
            options += (("grpc.ssl_target_name_override", self.tls.server_name),)
        return options


def make_access(addresses: str | Sequence[str], api_key: str | None, tls: Tls | None) -> Access:
    """How the servers at one or several addresses are reached.

    White space around the key does not count. Raises `ValueError` without an address, and for what cannot be a key.
    """
    found = (addresses,) if isinstance(addresses, str) else tuple(addresses)
    if not found or not all(found):
        raise ValueError(f"addresses: needed at least one HOST:PORT, found {addresses!r}")
    if api_key is not None:
        api_key = api_key.strip()
        if not api_key or not all("!" <= character <= "~" for character in api_key):
            raise ValueError("api_key: needed printable ASCII characters without spaces")
    return Access(found, api_key, tls)


class ServerChannels:
    """What the clients of both kinds share: one channel to each server, opened when it is needed."""

    _grpc: Any = grpc
    """The module that opens channels: `grpc` or `grpc.aio`."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        patience_seconds: float = DEFAULT_PATIENCE_SECONDS,
    ) -> None:
        self._access = make_access(addresses, api_key, tls)
        self._timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds
        self._channels: dict[str, Any] = {}
        self._current = 0

    def _stub(self) -> Any:
        """The stub of the server whose turn it is."""
        addresses = self._access.addresses
        address = addresses[self._current % len(addresses)]
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels.setdefault(address, self._open(address))
        return generation_pb2_grpc.GenerationServiceStub(channel)

    def _open(self, address: str) -> Any:
        tls, options = self._access.tls, self._access.options
        if _is_loopback(address):  # a proxy that the environment names cannot reach it
            options += (("grpc.enable_http_proxy", 0),)
        if tls is None:
            return self._grpc.insecure_channel(address, options=options)
        return self._grpc.secure_channel(address, tls.credentials(), options=options)


def _is_loopback(address: str) -> bool:
    """Whether `host:port` is an address of this machine alone."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read(name: str, file: str | Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        path = Path(file).expanduser()
    except RuntimeError:
        raise FileNotFoundError(f"{name}: needed a known user, found {file}") from None
    return path.read_bytes()
