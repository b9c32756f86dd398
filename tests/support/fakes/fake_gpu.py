"""A GPU of which it is known how long it takes, on a clock that stands still unless the host waits for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.transfer import DeviceTimer
from workers.verify import engine as engines
from workers.verify.engine import TargetEngine
from workers.verify.walk import TreeWalk

TOKEN_SECONDS = 0.001


class FakeGpu:
    """Takes `TOKEN_SECONDS` for each token of a pass, one pass after another."""

    def __init__(self) -> None:
        self.now = 100.0
        """The clock of the host, in seconds."""
        self._ends = 0.0
        """When all that is launched will be computed."""

    def launch(self, seconds: float) -> None:
        """Launch what takes so long."""
        self._ends = max(self._ends, self.now) + seconds

    def wait(self) -> None:
        """Wait until all that is launched is computed."""
        self.now = max(self.now, self._ends)

    def computes_for(self, engine: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let it compute the passes of an engine on a CPU. The host waits for it where the engine reads decisions."""
        forward, walk = engine._runner.forward, TreeWalk.walk
        clock = SimpleNamespace(perf_counter=lambda: self.now)

        def launch(rows: Any, *options: Any) -> Any:
            self.launch(TOKEN_SECONDS * sum(len(row.tokens) + len(row.tree) for row in rows))
            return forward(rows, *options)

        def read(self_: TreeWalk, decider: Any) -> Any:
            if any(entry.row.decide for entry in self_._ready):
                self.wait()
            return walk(self_, decider)

        monkeypatch.setattr(engine._runner, "forward", launch)
        monkeypatch.setattr(TreeWalk, "walk", read)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
        monkeypatch.setattr("workers.transfer.time", clock)
        monkeypatch.setattr(engines, "time", clock)
        monkeypatch.setattr(engines, "DeviceTimer", lambda _: DeviceTimer(torch.device("cuda")))


class _Event:
    """A CUDA event."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.reached = 0.0

    def record(self, _: object) -> None:
        self.reached = max(self._gpu.now, self._gpu._ends)

    def query(self) -> bool:
        return self._gpu.now >= self.reached

    def elapsed_time(self, other: _Event) -> float:
        """Milliseconds."""
        return 1000 * (other.reached - self.reached)
