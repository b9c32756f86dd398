"""Asks listening servers whether they demand a credential. What may not speak gRPC is sent nothing before it does."""

from __future__ import annotations

import socket
from enum import StrEnum
from typing import Any

import grpc

from cluster.wire.address import join_host_port
from cluster.wire.peer_access import Metadata

RAY_METHOD = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A method of Ray's control service (GCS) that changes nothing."""
_SECONDS = 5.0
_FRAME_HEADER_BYTES = 9
_FRAME_TYPE_AT = 3
_SETTINGS_FRAME = 4


class Demand(StrEnum):
    """What a server answers to a call without a credential."""

    CREDENTIAL = "credential"
    """It refuses the call as unauthenticated."""
    NOTHING = "nothing"
    """It answers the call."""
    UNKNOWN = "unknown"
    """It is no gRPC server that can be reached without TLS, or it has no such method."""


def speaks_grpc(host: str, port: int) -> bool:
    """Whether the server accepts HTTP/2 without TLS. Such a server sends first, so nothing is sent to it.

    Other servers, such as the ranks' store, may take offence at bytes that they do not expect.
    """
    received = b""
    try:
        with socket.create_connection((host, port), timeout=_SECONDS) as connection:
            connection.settimeout(1.0)
            while len(received) < _FRAME_HEADER_BYTES and (part := connection.recv(_FRAME_HEADER_BYTES)):
                received += part
    except OSError:
        pass
    return len(received) >= _FRAME_HEADER_BYTES and received[_FRAME_TYPE_AT] == _SETTINGS_FRAME


def probe(host: str, port: int, *methods: str, metadata: Metadata = ()) -> Demand:
    """Call the methods one after another, with an empty message, until one tells. The methods must be harmless."""
    return ask(host, port, *methods, metadata=metadata) if speaks_grpc(host, port) else Demand.UNKNOWN


def ask(host: str, port: int, *methods: str, metadata: Metadata = (), seconds: float = _SECONDS) -> Demand:
    """What a gRPC server demands of its callers. Its first bytes may come late, for example from behind a proxy.

    Each call may take `seconds`.
    """
    with grpc.insecure_channel(join_host_port(host, port), options=(("grpc.enable_http_proxy", 0),)) as channel:
        for method in methods:
            demand = _call(channel, method, metadata, seconds)
            if demand is not Demand.UNKNOWN:
                return demand
    return Demand.UNKNOWN


def _call(channel: grpc.Channel, method: str, metadata: Metadata, seconds: float) -> Demand:
    call: Any = channel.unary_unary(method)
    try:
        call(b"", timeout=seconds, metadata=metadata)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return Demand.CREDENTIAL
        unknown = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DEADLINE_EXCEEDED)
        return Demand.UNKNOWN if code in unknown else Demand.NOTHING
    return Demand.NOTHING
