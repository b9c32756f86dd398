"""Unix sockets that carry the commands of rank 0 to the other ranks of its host.

The kernel wakes a rank that waits, and ends its wait at once when rank 0 dies. Shared memory has neither: a rank would
spin, and would ask again and again whether rank 0 lives. A socket has no file: its name is in Linux' abstract
namespace, which the processes of one network namespace share. A rank elsewhere finds none.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections.abc import Mapping

from workers.ranks import AnotherRankFailed

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<QQ")
"""What a command begins with: its number, and the length of its payload in bytes."""
_RANK = struct.Struct("<Q")
_PEER = struct.Struct("iII")
"""Process, user and group of the other end."""


class CommandSockets:
    """One rank's connections: rank 0 has one to each other rank, and each of them has one to rank 0."""

    def __init__(self, connections: Mapping[int, socket.socket], seconds: float) -> None:
        """`connections` are by the rank at their other end. `seconds` bounds `send` and `receive`."""
        self._connections = connections
        self._seconds = seconds

    def send(self, command: int, payload: bytes) -> None:
        """Send a command to all other ranks. What a rank has not read yet waits in the kernel's buffer.

        Raises `AnotherRankFailed` if a rank has ended, or does not read and so leaves no room in time.
        """
        message = HEADER.pack(command, len(payload)) + payload
        deadline = time.monotonic() + self._seconds
        for rank, connection in self._connections.items():
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                connection.sendall(message)
            except OSError as error:
                raise AnotherRankFailed(f"rank {rank} has ended, or reads no commands: {error}") from error

    def wait(self) -> bytes:
        """The header of the next command, however long it takes to come. Raises `AnotherRankFailed` if rank 0 ends."""
        return self._read(HEADER.size, None)

    def receive(self, beginning: bytes) -> tuple[int, bytes]:
        """Number and payload of the command with this header. Raises `AnotherRankFailed` if rank 0 ends or is late."""
        command, length = HEADER.unpack(beginning)
        return command, self._read(length, self._seconds)

    def close(self) -> None:
        """Close all connections, which ends the wait of the other ranks. Closing twice is harmless."""
        for connection in self._connections.values():
            connection.close()

    def _read(self, size: int, seconds: float | None) -> bytes:
        connection, message = self._connections[0], bytearray(size)
        missing = memoryview(message)
        connection.settimeout(seconds)
        try:
            while missing:
                count = connection.recv_into(missing)
                if not count:
                    raise ConnectionResetError("it has closed the connection")
                missing = missing[count:]
        except OSError as error:
            raise AnotherRankFailed(f"rank 0 has ended, or sends no more: {error}") from error
        return bytes(message)


def listen(name: int) -> socket.socket | None:
    """Rank 0's listener, with a name that nobody guesses; `None` on a system without such names."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_address(name))
        listener.listen()
    except OSError:
        listener.close()
        return None
    return listener


def connect(name: int, rank: int) -> socket.socket | None:
    """A connection to rank 0, which listens already; `None` where it is not found, or is of another user.

    It does not wait for `accept`.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(_address(name))
        if _user_of(connection) == os.geteuid():
            connection.sendall(_RANK.pack(rank))
            return connection
    except OSError:
        pass
    connection.close()
    return None


def accept(listener: socket.socket, ranks: int) -> dict[int, socket.socket]:
    """The connections of all ranks above 0, which have called `connect` already, and close the listener.

    It waits for nobody: others who have connected are refused, and change nothing. Raises `ConnectionError` if a rank
    is missing.
    """
    found: dict[int, socket.socket] = {}
    with listener:
        listener.setblocking(False)
        while missing := set(range(1, ranks)) - found.keys():
            try:
                connection, _ = listener.accept()
            except BlockingIOError as error:
                raise ConnectionError(f"ranks {sorted(missing)} have not connected to rank 0 for commands") from error
            rank = _rank_of(connection)
            if rank in missing:
                found[rank] = connection
            else:
                logger.warning("rank 0 refuses the connection of a process that is none of ranks %s", sorted(missing))
                connection.close()
    return found


def _address(name: int) -> bytes:
    return f"\0pilotfish-{name:016x}".encode()


def _rank_of(connection: socket.socket) -> int:
    """The rank at the other end; 0, which never connects, for another user or one that has not said its rank."""
    if _user_of(connection) != os.geteuid():
        return 0
    try:
        (rank,) = _RANK.unpack(connection.recv(_RANK.size, socket.MSG_DONTWAIT))
    except (OSError, struct.error):
        return 0
    return int(rank)


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(user)
