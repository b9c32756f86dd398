"""gRPC channels with the options that every client of the cluster uses."""

from __future__ import annotations

import grpc

from cluster.core.bounds import MAX_MESSAGE_BYTES

_KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


def message_options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Return the gRPC options that bound the size of received messages, and that of sent ones by the largest bound.

    What answers a message may be longer than a message may be.
    """
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max(max_message_bytes, MAX_MESSAGE_BYTES)),
    )


def open_channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """Return a channel to `host:port`, without TLS if there are no `credentials`.

    With `server_name`, the server's certificate must have this name instead of its address.
    """
    options: tuple[tuple[str, int | str], ...] = (
        *message_options(max_message_bytes),
        *_KEEPALIVE_OPTIONS,
        ("grpc.enable_retries", 0),  # a Generate call must not run twice
        # Else a process that starts at the port of a dead one is refused while an older channel waits to try again.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),  # a proxy to the internet cannot reach addresses of the cluster
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.initial_reconnect_backoff_ms", 100),
    )
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name is not None:
        options += (("grpc.ssl_target_name_override", server_name),)
    return grpc.aio.secure_channel(address, credentials, options=options)
