"""Watches the memory of the machine for `pilotfish serve`: ends what is replaced cheaply, tells what the kernel ended.

Ray's own memory monitor is off there. It counts the memory of all programs, may kill every process of the cluster at
once, Serve's controller too, and tells only its own log.
"""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from deploy.machine import used_memory_share

_SECONDS = 2.0
"""How often the memory and the kernel's counter are read."""
_PAUSE_SECONDS = 30.0
"""How long after the end of a drafter the next one may be ended. Meanwhile its memory becomes free.

It doubles with each end: Serve starts the drafter again, and where that takes as much memory, its end frees nothing.
"""
_MOST_SECONDS = 3600.0
"""The longest such pause, and how long memory must suffice before the pauses begin anew."""
_CALM = 0.02
"""By how much the share must fall below the threshold before the next warning."""
_DRAFTER = re.compile(r"ray::ServeReplica:[^:]*:Draft\b")
"""The name that Ray gives the process of a drafter."""


@dataclass(frozen=True, slots=True)
class WatchedProcess:
    """A process below this one."""

    id: int
    name: str
    """Name that Ray gives the process, such as `ray::ServeReplica:pilotfish:Draft`."""
    memory_bytes: int = 0


class MemoryWatch:
    """Compares the kernel's count of killed processes, and the processes below this one, between two looks."""

    def __init__(self, count_kills: Callable[[], int], processes: Callable[[], Mapping[int, str]]) -> None:
        """`processes` are the names of this process's children by their ids."""
        self._count_kills = count_kills
        self._list = processes
        self._kills = count_kills()
        self._processes = processes()

    def look(self) -> str | None:
        """Return what to say about kills since the last look; `None` if there was none."""
        kills, before = self._count_kills(), self._processes
        new, self._kills, self._processes = kills - self._kills, kills, self._list()
        if new <= 0:
            return None
        gone = sorted(name for process, name in before.items() if process not in self._processes)
        who = ", ".join(gone) if gone else "none of this cluster"
        return (
            f"memory is used up, and the kernel killed {new} {'process' if new == 1 else 'processes'} ({who}); what "
            "belongs to the cluster is started again; lower target.kv.pool_bytes, choose a smaller model or free memory"
        )


class MemoryGuard:
    """Ends a drafter, the largest first, while more than a share of the memory is in use.

    Answers go on without it, and Serve starts another one. No other process of the cluster is ended: replacing it would
    stop answers or take as much memory again.
    """

    def __init__(
        self,
        threshold: float,
        used_share: Callable[[], float],
        processes: Callable[[], Iterable[WatchedProcess]],
        end: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threshold` is `cluster.memory_threshold`; with 1, nothing is ended. `end` ends the process with an id."""
        self._threshold = threshold
        self._used_share = used_share
        self._processes = processes
        self._end = end
        self._clock = clock
        self._next = 0.0
        self._pause = _PAUSE_SECONDS
        self._last_short = -math.inf
        self._has_warned = False

    def look(self) -> str | None:
        """End a drafter if memory is short. Returns what to say: who, why and what to set; `None` if all is well."""
        used = self._used_share()
        if self._threshold >= 1 or used <= self._threshold:
            self._has_warned = self._has_warned and used > self._threshold - _CALM
            return None
        now = self._clock()
        if now - self._last_short >= _MOST_SECONDS:
            self._pause = _PAUSE_SECONDS
        self._last_short = now
        if now < self._next:
            return None
        why = f"{used:.0%} of the memory is in use, more than cluster.memory_threshold ({self._threshold:g})"
        drafters = [process for process in self._processes() if _DRAFTER.match(process.name)]
        if drafters:
            largest = max(drafters, key=lambda process: process.memory_bytes)
            self._end(largest.id)
            self._next, self._pause = now + self._pause, min(2 * self._pause, _MOST_SECONDS)
            return (
                f"{why}: ended a drafter ({largest.name}, {largest.memory_bytes >> 20} MiB), answers go on without its "
                "drafts; free memory, lower draft.replicas or target.kv.pool_bytes, or raise cluster.memory_threshold"
            )
        if self._has_warned:
            return None
        self._has_warned = True
        return (
            f"{why}, and no process of the cluster can be replaced cheaply; when memory is used up, the kernel kills a "
            "process; free memory, lower target.kv.pool_bytes or choose a smaller model"
        )


def watch_memory(threshold: float, say: Callable[[str], None]) -> None:
    """Look every few seconds, in a thread that ends with this process. `threshold` is `cluster.memory_threshold`."""

    def run() -> None:
        watch = MemoryWatch(_kills, lambda: {process.id: process.name for process in _children()})
        guard = MemoryGuard(threshold, used_memory_share, _children, _end)
        while True:
            time.sleep(_SECONDS)
            for found in (guard.look(), watch.look()):
                if found is not None:
                    say(found)

    threading.Thread(target=run, name="memory-watch", daemon=True).start()


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _kills() -> int:
    """How many processes the kernel has killed for their memory; 0 where it does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text("ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _children() -> list[WatchedProcess]:
    """The processes below this one."""
    found: list[WatchedProcess] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = (child.cmdline() or [child.name()])[0]
            found.append(WatchedProcess(child.pid, name, child.memory_info().rss))
    return found
