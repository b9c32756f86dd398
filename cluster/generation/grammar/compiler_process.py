"""The process that compiles grammars as a check, so that no grammar can stop or crash the one that serves."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from cluster.core.grammar.source import PARSER_LIMITS

COMPILE_SECONDS = 2.0
"""Longest compilation, in seconds of processor time."""
_MOST_SECONDS = 60.0
"""Longest time for an answer of the process, in seconds, also on a busy machine."""
_MAIN = Path(__file__).with_name("compiler_main.py")


class CompilerProcess:
    """Compiles one grammar at a time. The process starts with the first one, and again after one that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def compile(self, source: str, *, is_ebnf: bool) -> tuple[str, str]:
        """Return the source in Lark's syntax, and the error, which is empty for a good grammar. This call blocks."""
        process = self._running()
        request = {"source": source, "is_ebnf": is_ebnf, "limits": dict(PARSER_LIMITS), "seconds": COMPILE_SECONDS}
        answer = _ask(process, json.dumps(request))
        if answer is None:
            self.close()
            return "", f"it takes more than {COMPILE_SECONDS:g} s or too much memory to compile"
        return str(answer["source"]), str(answer["error"])

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603 - a file of this package
                [sys.executable, "-P", str(_MAIN)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            weakref.finalize(self, _end, self._process)
        return self._process


def _ask(process: subprocess.Popen[str], line: str) -> dict[str, Any] | None:
    """Return the answer to one line; `None` if the process has ended."""
    if process.stdin is None or process.stdout is None:
        return None
    timer = threading.Timer(_MOST_SECONDS, process.kill)
    timer.start()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        return None
    finally:
        timer.cancel()
    return json.loads(answer) if answer else None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
