"""The process that compiles grammars as a check, so that no grammar can stop or crash the one that serves."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.core.errors import InvalidRequest, NotReady

_MOST_SECONDS = 60.0
"""Longest time for an answer of the process, in seconds, also on a busy machine."""
_MAIN = Path(__file__).with_name("compiler_main.py")
_TOO_SLOW = signal.SIGPROF
_NOT_ITS_OWN = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that come from outside, so they say nothing about a grammar."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compilation of a grammar showed."""

    source: str
    """The grammar in Lark's syntax, if it was given in Lark's syntax or EBNF."""
    error: str = ""
    """Why the grammar cannot be used; empty for a good one."""
    was_too_slow: bool = False
    """Whether it took more than the allowed time."""
    reference: str = ""
    """The reference of a schema that `error` says the bound of, as JSON; empty where it is about the whole grammar."""


class CompilerProcess:
    """Compiles one grammar at a time. The process starts with the first one, and again if it has ended."""

    def __init__(self, vocabulary: Path) -> None:
        """`vocabulary` is the model's `tokenizer.json`."""
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None

    def compile(self, source: str, limits: Mapping[str, Any], *, is_ebnf: bool, seconds: float) -> Compiled:
        """Compile within `seconds` of processor time. This call blocks; only one thread may call at a time.

        Raises `NotReady` for a failure that the grammar did not cause, and `InvalidRequest` (`grammar`) if the
        vocabulary cannot be used.
        """
        request = {"source": source, "is_ebnf": is_ebnf, "limits": dict(limits), "seconds": seconds}
        try:
            answer = _ask(self._running(), json.dumps(request))
        except OSError:
            answer = None
        if answer is None or answer["signal"] in _NOT_ITS_OWN:
            self.close()
            raise NotReady("the process that compiles grammars has ended; send the request again")
        if answer.get("vocabulary"):
            self.close()  # the file is read again for the next grammar
            raise InvalidRequest("grammar", source, f"left out: {answer['vocabulary']}")
        if answer["signal"] == _TOO_SLOW:
            return Compiled("", f"it takes more than {seconds:g} s to compile", was_too_slow=True)
        if answer["signal"]:
            return Compiled("", "it takes too much memory or is nested too deeply to compile")
        return Compiled(str(answer["source"]), str(answer["error"]))

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(  # noqa: S603 - a file of this package
                [sys.executable, "-P", str(_MAIN), str(self._vocabulary)],
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
