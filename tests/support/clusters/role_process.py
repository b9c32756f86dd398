"""Processes of a cluster that are killed and stopped by tests, and replaced by what their owner would use."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.clusters.role_main import RoleSpec, run_role
from workers.serve.rank_actors import until_lost

START_SECONDS = 120.0
"""Longest start on a busy machine, in seconds."""
PING_SECONDS = 2.0
"""Longest wait for the answer to a ping, in seconds: four unanswered ones make a process count as frozen."""
PERIOD_SECONDS = 0.25


class Unhealthy(Exception):
    """The process answers that it must be replaced."""


class RoleProcess:
    """One process, from `start()` until it ends. It is started once."""

    def __init__(self, spec: RoleSpec, log: Path) -> None:
        self._spec = spec
        self._log = log
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[tuple[str, str]] | None = None
        self._pipe: Connection | None = None
        self._process: Any = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return int(self._process.pid)

    def launch(self) -> None:
        """Start the process without waiting for it."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.clusters.role_preload"])
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=run_role, args=(self._spec.to_json(), child, str(self._log)))
        self._process.start()
        child.close()
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(self._pipe.fileno(), self._receive)

    async def ready(self) -> tuple[str, str]:
        """Return its address, and the URL of its HTTP API, if it has one, once it serves.

        Raises `ConnectionError` when it ends before.
        """
        if self._ready is None:
            raise RuntimeError("the process was not launched")
        async with asyncio.timeout(START_SECONDS):
            return await asyncio.shield(self._ready)

    async def ask(self, question: str) -> dict[str, Any]:
        """Ask the process. Raises `ConnectionError` when it has ended."""
        if self._pipe is None:
            raise ConnectionError("the process has ended")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._pipe.send_bytes(json.dumps({"ask": question, "number": number}).encode())
            return await answer
        finally:
            self._asked.pop(number, None)

    async def ping(self) -> None:
        """Raises `Unhealthy` or `ConnectionError` when the process must be replaced."""
        answer = await self.ask("ping")
        if "unhealthy" in answer:
            raise Unhealthy(answer["unhealthy"])

    async def until_lost(self) -> str:
        """Return once the process has ended, is frozen, or is unhealthy, with the reason."""
        return await until_lost(self.ping, PING_SECONDS, PERIOD_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. Does nothing when the process has ended."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def end(self) -> None:
        """Kill the process if it runs, and reap it."""
        if self._process is None:
            return
        self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.join)
        self._lose()
        self._process.close()
        self._process = None

    def _receive(self) -> None:
        try:
            answer = json.loads(self._pipe.recv_bytes()) if self._pipe is not None else {}
        except (EOFError, OSError):
            self._lose()
            return
        if "address" in answer and self._ready is not None and not self._ready.done():
            self._ready.set_result((answer["address"], answer["http_url"]))
        asked = self._asked.pop(answer.get("number", -1), None)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    def _lose(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()
        error = ConnectionError("the process has ended")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may wait for it
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)
        self._asked.clear()
