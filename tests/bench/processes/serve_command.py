"""Runs `pilotfish serve` as a separate process, from the command line to the signal that ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.bench.processes.staged_serve import PREFIX
from workers.serve.node import free_port

ROOT = Path(__file__).resolve().parents[3]
LOOPBACK = "127.0.0.1"
START_SECONDS = 600.0
END_SECONDS = 60.0
POLL_SECONDS = 0.5
READY = " is ready at "
"""Text that the command prints when it accepts requests."""


class ServeCommand:
    """Runs `pilotfish serve` inside `with`. Raises `RuntimeError` with its last output when it does not start."""

    def __init__(
        self,
        config: str | None,
        assignments: Sequence[str],
        module: str = "deploy.cli",
        checkout: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`module` runs the command line; another one than `deploy.cli` may print what `stages` reads.

        `checkout` is the directory of the project whose code runs, in this process' environment and with the variables
        of `environment`.
        """
        self._checkout = checkout.resolve()
        self._environment = dict(environment or {})
        self._config = config
        self._module = module
        self._assignments = tuple(assignments)
        self.grpc_address = ""
        self.http_url = ""

    def __enter__(self) -> Self:
        port, http_port = free_port(LOOPBACK), free_port(LOOPBACK)
        self.grpc_address, self.http_url = f"{LOOPBACK}:{port}", f"http://{LOOPBACK}:{http_port}"
        command = [sys.executable, "-m", self._module, "serve"]
        command += ["--config", self._config] if self._config is not None else []
        for assignment in (*self._assignments, f"server.grpc_port={port}", f"server.http_port={http_port}"):
            command += ["--set", assignment]
        self._output = tempfile.TemporaryFile()
        # Installed packages have compiled modules. Without them, each process compiles those of Pilotfish anew.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment |= self._environment
        if self._checkout != ROOT:
            environment["PYTHONPATH"] = f"{self._checkout}:{self._checkout / 'protos'}"
        self._process = subprocess.Popen(
            command, cwd=self._checkout, env=environment, stdout=self._output, stderr=subprocess.STDOUT
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    @property
    def pid(self) -> int:
        """The process id of the command. All processes of the cluster descend from it."""
        return self._process.pid

    @property
    def stages(self) -> list[tuple[str, float]]:
        """The stages of the start, in order, with their times since the epoch, as `staged_serve` prints them."""
        lines = (line.split(maxsplit=2) for line in self._printed().splitlines() if line.startswith(PREFIX))
        return [(name, float(seconds)) for _, seconds, name in lines]

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while READY not in (printed := self._printed()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pilotfish serve did not start: {printed[-2000:]}")
            time.sleep(POLL_SECONDS)

    def _printed(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")
