"""The process group of a tensor-parallel target, and the commands that its driver rank broadcasts.

Rank 0 is the driver rank: it serves gRPC. The other ranks are worker ranks. For every call the driver broadcasts one
command, as bytes (a step is its own protobuf message, never a pickle), and all ranks run the same call on their own
engine. After any failure the ranks may hold different states, so the owner of the group restarts all of them.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
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


_FIRST_BYTES = 8192
"""Size of the broadcast of each command: a header, then the beginning of the payload. Only what does not fit into it
takes another broadcast; a row of a step has about 60 bytes."""
_HEADER = struct.Struct("<QQ")
"""Command, and length of the payload in bytes."""


class _Command(IntEnum):
    STEP = 1
    RELEASE = 2
    OPEN = 3
    STOP = 4
    RELEASE_ALL = 5


class DriverRank:
    """The engine of rank 0, which broadcasts every call to the worker ranks before it runs it itself."""

    def __init__(self, engine: TargetEngine, step_timeout_seconds: float) -> None:
        """`step_timeout_seconds` is what bounds each collective; see `bound_collectives`."""
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
        self._broadcast(_Command.STEP, step_batch_to_bytes(batch))
        with self._failing_together():
            return self._engine.step(batch)

    def release(self, sequence_ids: Sequence[SequenceId]) -> KvOccupancy:
        """Free sequences on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._broadcast(_Command.RELEASE, json.dumps(list(sequence_ids)).encode())
        return self._engine.release(sequence_ids)

    def release_all(self) -> KvOccupancy:
        """Free all sequences on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._broadcast(_Command.RELEASE_ALL, b"")
        return self._engine.release_all()

    def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Begin sequences on all ranks. Raises `TargetUnavailable` once the group has failed."""
        self._broadcast(_Command.OPEN, open_rows_to_bytes(rows))
        with self._failing_together():
            return self._engine.open(rows)

    def close(self) -> None:
        """Stop the worker ranks and close this rank's engine; no call can follow. Closing twice is harmless."""
        try:
            if self._failure is None:
                self._broadcast(_Command.STOP, b"")
                self._failure = "it is closed"
        except TargetUnavailable:
            pass  # already logged; worker ranks end when their connection closes
        finally:
            self._engine.close()

    def _broadcast(self, command: _Command, payload: bytes) -> None:
        if self._failure is not None:
            raise TargetUnavailable(f"the tensor-parallel group is broken: {self._failure}")
        with self._failing_together():
            message = bytearray(_HEADER.pack(command, len(payload)) + payload)
            message.extend(bytes(max(0, _FIRST_BYTES - len(message))))
            whole = torch.frombuffer(message, dtype=torch.uint8)
            distributed.broadcast(whole[:_FIRST_BYTES], src=0)
            if len(message) > _FIRST_BYTES:
                distributed.broadcast(whole[_FIRST_BYTES:], src=0)

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

    It waits for each command without a bound. `step_timeout_seconds` is what bounds the collectives of a command; see
    `bound_collectives`. Raises any error that ends the group, after closing the engine.
    """
    try:
        while True:
            first = _receive_first()
            with _answered_within(step_timeout_seconds):
                command, payload = _receive_rest(first)
                if command is _Command.STOP:
                    return
                _execute(engine, command, payload)
    finally:
        engine.close()


@contextmanager
def _answered_within(seconds: float) -> Iterator[None]:
    """Raise `TargetUnavailable`, which names the setting, for an error of a collective that waited for `seconds`."""
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() - begun < seconds:
            raise
        raise TargetUnavailable(
            f"a rank has not answered within target.step_timeout_seconds: {seconds:g}; it hangs or is lost ({error})"
        ) from error


def _receive_first() -> torch.Tensor:
    """The beginning of the next command, however long it takes to come; uint8 `[_FIRST_BYTES]`."""
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, UNBOUNDED
    distributed.distributed_c10d._get_default_group().broadcast([first], options).wait()
    return first


def _receive_rest(first: torch.Tensor) -> tuple[_Command, bytes]:
    message = first.numpy().tobytes()
    command, length = _HEADER.unpack_from(message)
    missing = _HEADER.size + length - _FIRST_BYTES
    if missing > 0:
        rest = torch.zeros(missing, dtype=torch.uint8)
        distributed.broadcast(rest, src=0)
        message += rest.numpy().tobytes()
    return _Command(command), message[_HEADER.size : _HEADER.size + length]


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
