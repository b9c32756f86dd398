"""A Redis server with one user, for tests of Ray's control store."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from workers.serve.node import free_port

LOOPBACK = "127.0.0.1"
START_SECONDS = 30.0
PROGRAM = shutil.which("redis-server")


@dataclass(frozen=True)
class RedisServer:
    """A running server. Its default user may do nothing."""

    address: str
    username: str
    password: str


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """Inside, a Redis server runs that keeps its files in `directory`. Raises `RuntimeError` if it does not start."""
    if PROGRAM is None:
        raise RuntimeError("redis-server is not installed")
    port, username, password = free_port(LOOPBACK), "ray", token_hex(16)
    settings = directory / "redis.conf"
    settings.write_text(
        f"bind {LOOPBACK}\nport {port}\ndir {directory}\nuser default off\nuser {username} on >{password} ~* &* +@all\n"
    )
    process = subprocess.Popen([PROGRAM, settings], stdout=subprocess.DEVNULL)
    try:
        _wait(port, process)
        yield RedisServer(f"{LOOPBACK}:{port}", username, password)
    finally:
        process.terminate()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((LOOPBACK, port), timeout=1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("redis-server did not start")
