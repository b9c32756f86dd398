"""The node that a process runs on: its address, its free ports, its threads."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import ray

from cluster.wire.address import socket_family

OOM_SCORE = 500
"""How readily the kernel ends a process of the cluster when memory is used up: a number up to 1000. Ray's is 1000."""
FIRST_OOM_SCORE = 1000
"""How readily the kernel ends a process that is replaced cheaply."""
_SYSTEM_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000
"""Ray gives ports below this one to its workers."""
_END_OF_PORTS = 30_000
"""Kubernetes gives ports from this one on to services."""
_PORT_TRIALS = 50


def set_threads(threads: int) -> None:
    """Set the number of intra-op threads of this process; Ray's default is one."""
    import torch  # a process that only imports this module starts seconds faster

    torch.set_num_threads(threads)


def compute_without_interruption() -> None:
    """Keep background processes (see `in_background`) from preempting threads of this process when they become ready.

    Where the system permits it, this process also gets the niceness of the process that started it: Ray starts its
    workers with a niceness of 15. Threads that start later inherit both.
    """
    if hasattr(os, "SCHED_BATCH"):
        niceness = os.getpriority(os.PRIO_PROCESS, os.getppid())
        for thread in map(int, os.listdir("/proc/self/task")):
            with suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
                if os.getpriority(os.PRIO_PROCESS, thread) > niceness:
                    os.setpriority(os.PRIO_PROCESS, thread, niceness)


@contextmanager
def in_background() -> Iterator[None]:
    """Processes started inside, and all that they start, do not preempt others when they become ready.

    They run when a core is free or when it is their turn (Linux's policy `SCHED_BATCH`).
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameter)


def node_address() -> str:
    """The address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def use_interface_of(address: str) -> None:
    """Make the ranks' collectives listen on the network interface that has `address`, unless the environment has one.

    By default they listen on the address that the name of the host resolves to.
    """
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[None]:
    """Inside, only sockets that share the port (`SO_REUSEPORT`) can listen on it.

    Programs that ask the system for any free port do not get it.
    """
    with socket.socket(socket_family(host)) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind((host, port))
        yield


def free_port(host: str) -> int:
    """A port of `host` that is free now, and that programs which ask the system for any free port do not get later.

    It is chosen at random, so that two callers hardly ever choose the same one. Where the system gives out all ports,
    it is one that the system chooses.
    """
    ports = _own_ports()
    for port in random.SystemRandom().sample(ports, min(_PORT_TRIALS, len(ports))):
        with suppress(OSError), socket.socket(socket_family(host)) as probe:
            probe.bind((host, port))
            return port
    with socket.socket(socket_family(host)) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _own_ports() -> range:
    """The ports that neither Linux nor Ray gives to programs which ask for any; none where they cannot be known."""
    with suppress(OSError, ValueError):
        first, _ = map(int, _SYSTEM_PORTS.read_text().split())
        if first >= _FIRST_PORT + _PORT_TRIALS:
            return range(_FIRST_PORT, min(first, _END_OF_PORTS))
    return range(0)


def offer_to_end_first() -> None:
    """Let the kernel end this process before others of the cluster when memory is used up: it is replaced cheaply."""
    with suppress(OSError):  # not on every platform
        Path("/proc/self/oom_score_adj").write_text(str(FIRST_OOM_SCORE))
