"""The process group of a tensor-parallel target, and the commands that its driver rank gives.

Rank 0 is the driver rank: it serves gRPC. The other ranks are worker ranks. For every call the driver sends one
command, as bytes (a step is its own protobuf message, never a pickle), and all ranks run the same call on their own
engine. After any failure the ranks may hold different states, so the owner of the group restarts all of them.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from enum import IntEnum
from typing import Any

from torch import distributed

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvOccupancy
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo
from cluster.wire.address import socket_family
from cluster.wire.codec.opening import open_rows_from_bytes, open_rows_to_bytes
from cluster.wire.codec.step import step_batch_from_bytes, step_batch_to_bytes
from workers.model.devices import choose_device
from workers.ranks import UNBOUNDED, begin_group
from workers.verify.commands import connect_commands
from workers.verify.engine import TargetEngine

logger = logging.getLogger(__name__)


def join_group(section: TargetSection, rank: int, address: str, port: int) -> None:
    """Join the process group whose rank 0 listens at `address:port`: gloo between CPUs, NCCL between GPUs.

    Its collectives wait for a rank without a bound until `bound_collectives`, which `build_engine` calls at its end.
    Raises `ConfigurationError` when CUDA is configured and absent, or is found by some ranks alone, and `OSError` when
    rank 0 cannot listen.
    """
    begin_group()
    device, store = choose_device(section.device, rank).type, _store(rank, address, port)
    _check_devices(section, rank, device, store)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=section.tensor_parallel,
        timeout=UNBOUNDED,
    )


def _check_devices(section: TargetSection, rank: int, device: str, store: Any) -> None:
    """Raise `ConfigurationError` on all ranks unless they have devices of one kind."""
    store.set(f"device {rank}", device)
    found = [store.get(f"device {one}").decode() for one in range(section.tensor_parallel)]
    if len(set(found)) == 1:
        return
    store.set(f"refused {rank}", device)
    if rank == 0:  # its store ends with it
        store.wait([f"refused {one}" for one in range(section.tensor_parallel)])
    raise ConfigurationError(
        f"target.device: {section.device} is refused, because it is {', '.join(found)} for ranks 0 to "
        f"{section.tensor_parallel - 1}; it must be one kind for all ranks"
    )


def _store(rank: int, address: str, port: int) -> Any:
    """The store in which the ranks find each other. Rank 0 listens on `address` alone, not on all interfaces."""
    listener = socket.create_server((address, port), family=socket_family(address)).detach() if rank == 0 else None
    return distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=rank == 0, timeout=UNBOUNDED, master_listen_fd=listener
    )


def leave_group() -> None:
    """Leave the process group. Does nothing in a process that has not joined one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def leave_group_at_last() -> None:
    """Leave the process group in a process that computes no more: its connections close, and the other ranks notice.

    A group with NCCL ends with the process, which its owner kills. Leaving it would wait for sums with a rank that is
    lost, and for CUDA graphs that hold sums, so that nobody would hear of an error.
    """
    if distributed.is_initialized() and "nccl" not in distributed.get_backend_config():
        leave_group()


class _Command(IntEnum):
    STEP = 1
    RELEASE = 2
    OPEN = 3
    STOP = 4
    RELEASE_ALL = 5


class DriverRank:
    """The engine of rank 0, which sends every call to the worker ranks before it runs it itself."""

    def __init__(self, engine: TargetEngine, step_timeout_seconds: float) -> None:
        """Connect with the worker ranks, which call `run_worker_rank` meanwhile.

        `step_timeout_seconds` bounds each command, and is what bounds each collective; see `bound_collectives`. Raises
        `AnotherRankFailed`.
        """
        self._commands = connect_commands(step_timeout_seconds)
        self._engine = engine
        self._step_timeout_seconds = step_timeout_seconds
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """The error because of which the group must be restarted; `None` while it works."""
        return self._failure

    def info(self) -> TargetInfo:
        """Describe this target."""
        return self._engine.info()

    def step(self, batch: StepBatch) -> StepResult:
        """Compute one step on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._send(_Command.STEP, step_batch_to_bytes(batch))
        with self._failing_together():
            return self._engine.step(batch)

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free sequences on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._send(_Command.RELEASE, json.dumps(list(sequence_ids)).encode())
        with self._failing_together():
            return self._engine.release(sequence_ids)

    def release_all(self) -> KvOccupancy:
        """Free all sequences on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._send(_Command.RELEASE_ALL, b"")
        with self._failing_together():
            return self._engine.release_all()

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Begin sequences on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._send(_Command.OPEN, open_rows_to_bytes(rows))
        with self._failing_together():
            return self._engine.open(rows)

    def close(self) -> None:
        """Stop the worker ranks and close this rank's engine; no call can follow. Closing twice is harmless."""
        try:
            if self._failure is None:
                self._send(_Command.STOP, b"")
                self._failure = "it is closed"
        except TargetUnavailable:
            pass  # already logged; worker ranks end when their connection closes
        finally:
            self._commands.close()
            self._engine.close()

    def _send(self, command: _Command, payload: bytes) -> None:
        if self._failure is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._failure}")
        with self._failing_together():
            self._commands.send(command, payload)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Mark the group as failed when anything is raised inside: the ranks may hold different states."""
        try:
            with _answered_within(self._step_timeout_seconds):
                yield
        except BaseException as error:
            self._failure = str(error) if isinstance(error, TargetUnavailable) else repr(error)
            logger.error("the tensor-parallel group is broken: %s", self._failure)
            if isinstance(error, Exception):
                raise TargetUnavailable(f"the tensor-parallel group is broken: {self._failure}") from error
            raise


def run_worker_rank(engine: TargetEngine, step_timeout_seconds: float) -> None:
    """Run the driver rank's commands on this rank's engine until the stop command, then close the engine.

    It connects with the driver rank, then waits for each command without a bound. `step_timeout_seconds` bounds what
    is left of a command that has begun to come, and is what bounds its collectives; see `bound_collectives`. Raises
    any error that ends the group, after closing the engine.
    """
    with closing(engine), closing(connect_commands(step_timeout_seconds)) as commands:
        while True:
            beginning = commands.wait()
            with _answered_within(step_timeout_seconds):
                number, payload = commands.receive(beginning)
                command = _Command(number)
                if command is _Command.STOP:
                    return
                _execute(engine, command, payload)


@contextmanager
def _answered_within(seconds: float) -> Iterator[None]:
    """Raise `TargetUnavailable`, which names the setting, for an error of a wait for other ranks of `seconds`."""
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() - begun < seconds:
            raise
        raise TargetUnavailable(
            f"a rank has not answered within target.step_timeout_seconds: {seconds:g}; it hangs or is lost ({error})"
        ) from error


def _execute(engine: TargetEngine, command: _Command, payload: bytes) -> None:
    match command:
        case _Command.STEP:
            engine.step(step_batch_from_bytes(payload))
        case _Command.OPEN:
            engine.open(open_rows_from_bytes(payload))
        case _Command.RELEASE:
            engine.release([SequenceId(name) for name in json.loads(payload)])
        case _Command.RELEASE_ALL:
            engine.release_all()
