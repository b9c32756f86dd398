"""The node that a process runs on: its address, its free ports, its threads."""

from __future__ import annotations

import socket

import ray

from cluster.wire.address import socket_family


def set_threads(threads: int) -> None:
    """Set the number of intra-op threads of this process; Ray's default is one."""
    import torch  # a process that only imports this module starts seconds faster

    torch.set_num_threads(threads)


def node_address() -> str:
    """The address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def free_port(host: str) -> int:
    """A port of `host` that is free now."""
    with socket.socket(socket_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
