"""Says in one line that the kernel has killed a process because memory was used up: which one, and what to set."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

_SECONDS = 2.0
"""How often the kernel's counter is read."""


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


def watch_memory(say: Callable[[str], None]) -> None:
    """Look every few seconds, in a thread that ends with this process. Does nothing where the kernel has no counter."""
    if not _kills():
        return

    def run() -> None:
        watch = MemoryWatch(lambda: _kills().get("oom_kill", 0), _children)
        while True:
            time.sleep(_SECONDS)
            found = watch.look()
            if found is not None:
                say(found)

    threading.Thread(target=run, name="memory-watch", daemon=True).start()


def _kills() -> dict[str, int]:
    """The kernel's count of processes that it killed for their memory; empty where there is none."""
    try:
        lines = Path("/proc/vmstat").read_text("ascii").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split() for line in lines) if name == "oom_kill"}


def _children() -> dict[int, str]:
    """The names of the processes below this one, as Ray shows them."""
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            found[child.pid] = (child.cmdline() or [child.name()])[0]
        except psutil.Error:
            continue
    return found
