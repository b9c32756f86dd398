"""Which processes of Pilotfish and Ray listen on which addresses of this machine."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil

RAY_PROGRAMS = ("gcs_server", "raylet")
"""Names of the processes of Ray without which no other one of it works."""
_COMMANDS = ("/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/", "deploy.cli", "deploy/cli.py", "bin/pilotfish ")
"""Parts of the command lines of Ray's helpers and of Pilotfish's command line."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A TCP port at which a process accepts connections."""

    pid: int
    process: str
    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        address = ipaddress.ip_address(self.host)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def cluster_processes() -> tuple[psutil.Process, ...]:
    """All processes of Ray and Pilotfish on this machine, except this one."""
    return tuple(process for process in psutil.process_iter() if process.pid != os.getpid() and _is_ours(process))


def listeners(processes: Iterable[psutil.Process]) -> tuple[Listener, ...]:
    """The listeners of the processes that this user may look into, each once, in order of their ports."""
    found = {listener for process in processes for listener in _listeners(process)}
    return tuple(sorted(found, key=lambda listener: (listener.port, listener.host, listener.pid)))


def _is_ours(process: psutil.Process) -> bool:
    try:
        name, line = process.name(), " ".join(process.cmdline())
    except psutil.Error:  # it has ended, or belongs to another user
        return False
    return name.startswith("ray::") or name in RAY_PROGRAMS or any(part in f"{line} " for part in _COMMANDS)


def _listeners(process: psutil.Process) -> Iterator[Listener]:
    try:
        name = process.name()
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                yield Listener(process.pid, name, connection.laddr.ip, connection.laddr.port)
    except psutil.Error:
        return
