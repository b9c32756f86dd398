"""A child process that answers lines of JSON on stdin with lines of JSON on stdout. It ends when stdin is closed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
END_SECONDS = 60.0
"""Seconds that the process may take to end after its stdin is closed. Then it is killed."""


class JsonProcess:
    """`python -m module *arguments`, started fresh. Its stderr goes to a file and into error messages."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._name = module
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._process.pid

    def ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send one line and return the answer. Raises `RuntimeError` if none comes within `seconds`."""
        if self._process.stdin is None:
            raise RuntimeError(f"{self._name}: the process has no stdin")
        try:
            self._process.stdin.write(f"{json.dumps(message)}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self._name}: the process has ended; {self._last_errors()}") from None
        return self.read(seconds)

    def read(self, seconds: float) -> dict[str, Any]:
        """Return one line of its stdout. Raises `RuntimeError` if none comes within `seconds`."""
        output = self._process.stdout
        if output is None:
            raise RuntimeError(f"{self._name}: the process has no stdout")
        line, until = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([output], [], [], max(0.0, until - time.monotonic()))
            part = os.read(output.fileno(), 65536) if readable else b""
            if not part:
                raise RuntimeError(
                    f"{self._name}: the process ended or sent no answer in {seconds:g} s; {self._last_errors()}"
                )
            line += part
        values: dict[str, Any] = json.loads(line)
        return values

    def stop(self) -> None:
        """Close its stdin and wait for its end."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _last_errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]
