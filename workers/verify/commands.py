"""How commands, each a number and bytes, come from rank 0 to the other ranks of its group, in order.

They go over Unix sockets where all ranks are on one host, else as broadcasts.
"""

from __future__ import annotations

import logging
import secrets
from typing import Protocol

import torch
from torch import distributed

from workers.ranks import UNBOUNDED, failing_together, found_by_all, least_of_all_ranks
from workers.verify.command_sockets import HEADER, CommandSockets, accept, connect, listen

logger = logging.getLogger(__name__)

_NAME_BITS = 62
_LARGEST_NUMBER = (1 << 63) - 1
_FIRST_BYTES = 8192
"""Size of the broadcast of each command: a header, then the beginning of the payload. Only what does not fit into it
takes another broadcast; a row of a step has about 60 bytes."""


class Commands(Protocol):
    """One rank's end of the way of commands. Rank 0 sends. The others wait and receive, in turn."""

    def send(self, command: int, payload: bytes) -> None:
        """Send a command to all other ranks. Raises `RuntimeError` if one has ended, or does not take it in time."""

    def wait(self) -> bytes:
        """The beginning of the next command, however long it takes to come. Raises `RuntimeError` if rank 0 ends."""

    def receive(self, beginning: bytes) -> tuple[int, bytes]:
        """Number and payload of the command that begins so. Raises `RuntimeError` if rank 0 ends or is late."""

    def close(self) -> None:
        """End this way. Closing twice is harmless."""


def connect_commands(seconds: float) -> Commands:
    """Connect this rank with the others of the group that it has joined. All ranks call this together.

    `seconds` bounds sending and receiving over sockets, as `bound_collectives` bounds broadcasts. Raises
    `AnotherRankFailed` if another rank has failed or hangs.
    """
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    name = secrets.randbits(_NAME_BITS) if rank == 0 else _LARGEST_NUMBER
    listener = listen(name) if rank == 0 else None
    name = least_of_all_ranks(name, ranks)  # that of rank 0, which listens by now
    own = connect(name, rank) if rank else listener
    found = found_by_all(own, ranks)  # where all connect they have done so by now: nobody waits for another
    if found is None:
        if own is not None:
            own.close()
        logger.info("a rank finds no Unix socket of rank 0, as on another host: commands are broadcast")
        return Broadcasts()
    with failing_together(ranks):
        connections = {0: found} if rank else accept(found, ranks)
    return CommandSockets(connections, seconds)


class Broadcasts:
    """Commands as broadcasts of the group, whichever hosts its ranks are on. `bound_collectives` bounds them."""

    def send(self, command: int, payload: bytes) -> None:
        """Send a command to all other ranks. Raises `RuntimeError` if one has left the group or is late."""
        message = bytearray(HEADER.pack(command, len(payload)) + payload)
        message.extend(bytes(max(0, _FIRST_BYTES - len(message))))
        whole = torch.frombuffer(message, dtype=torch.uint8)
        distributed.broadcast(whole[:_FIRST_BYTES], src=0)
        if len(message) > _FIRST_BYTES:
            distributed.broadcast(whole[_FIRST_BYTES:], src=0)

    def wait(self) -> bytes:
        """The first broadcast of the next command, however long it takes to come; `_FIRST_BYTES` bytes."""
        first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, UNBOUNDED
        distributed.distributed_c10d._get_default_group().broadcast([first], options).wait()
        return first.numpy().tobytes()

    def receive(self, beginning: bytes) -> tuple[int, bytes]:
        """Number and payload of the command that begins so. Raises `RuntimeError` if rank 0 has left or is late."""
        command, length = HEADER.unpack_from(beginning)
        missing = HEADER.size + length - _FIRST_BYTES
        if missing > 0:
            rest = torch.zeros(missing, dtype=torch.uint8)
            distributed.broadcast(rest, src=0)
            beginning += rest.numpy().tobytes()
        return command, beginning[HEADER.size : HEADER.size + length]

    def close(self) -> None:
        """Do nothing: broadcasts end with the group."""
