"""Clusters of processes, each on its own cores, that share a target and are asked in turn.

A target serves one coordinator at a time. These are asked one after the other and hold nothing in between, so
that what is compared is the same process, with the same weights at the same place in memory.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.core.config import Configuration
from deploy.lossless import with_acceptance
from tests.bench.role_process import Role

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS = 300.0
ANSWER_SECONDS = 60.0
END_SECONDS = 20.0


class Process:
    """A role that runs from `with` on; ends with it. Raises `RuntimeError` with its last words when it fails."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.address = ""

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.role_process", self._role.to_json()],
            cwd=ROOT,
            env={"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
            | os.environ
            | {"OMP_NUM_THREADS": str(self._role.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        try:
            self.address = str(self._read(START_SECONDS)["address"])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def collect(self) -> dict[str, float]:
        """What it did since it was last asked."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        return self._read(ANSWER_SECONDS)

    def _read(self, seconds: float) -> dict[str, float]:
        """One line of JSON, within `seconds`."""
        output = self._process.stdout
        if output is None:
            raise RuntimeError("the process has no output")
        line, until = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([output], [], [], max(0.0, until - time.monotonic()))
            part = os.read(output.fileno(), 65536) if readable else b""
            if not part:
                raise RuntimeError(
                    f"{self._role.role}: it ended or gave no answer in {seconds:g} s; {self._last_words()}"
                )
            line += part
        values: dict[str, float] = json.loads(line)
        return values

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]


def target(configuration: Configuration, cores: Sequence[int]) -> Process:
    """A target with a thread per core."""
    settled = with_acceptance(configuration).model_dump_json()
    return Process(Role("target", settled, tuple(cores), len(cores)))


def draft(configuration: Configuration, cores: Sequence[int]) -> Process:
    """A drafter of one thread."""
    return Process(Role("draft", with_acceptance(configuration).model_dump_json(), tuple(cores)))


def coordinator(configuration: Configuration, target: Process, draft: Process) -> Process:
    """Coordinator and public services, wherever there is room."""
    settled = with_acceptance(configuration).model_dump_json()
    return Process(Role("coordinator", settled, tuple(all_cores()), 1, target.address, (draft.address,)))


def all_cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Activity:
    """What a cluster did meanwhile."""

    ready: float
    """Nodes that were proposed and had been grown before they were asked for."""
    nodes: float
    """Nodes proposed."""
    target_idle: float
    """Share of the time in which the target computed no step."""
    draft_idle: float
    """Share of the time in which the drafter computed nothing."""

    @property
    def hit_rate(self) -> float:
        """Share of proposed nodes that were ready."""
        return self.ready / self.nodes if self.nodes else 0.0


@dataclass(frozen=True)
class ProcessCluster:
    """One way of serving: what is asked, and who works for it."""

    coordinator: Process
    target: Process
    draft: Process

    def collect(self) -> Activity:
        """What was done since it was last asked."""
        counts = self.coordinator.collect()
        return Activity(
            counts["ready"], counts["nodes"], _idle_share(self.target.collect()), _idle_share(self.draft.collect())
        )


def start_cluster(
    stack: ExitStack, configuration: Configuration, target: Process, drafter: Process | None = None
) -> ProcessCluster:
    """Before a target that runs; with a drafter of its own, on any core, unless there is one."""
    drafter = drafter or stack.enter_context(draft(configuration, all_cores()))
    return ProcessCluster(stack.enter_context(coordinator(configuration, target, drafter)), target, drafter)


def _idle_share(counters: dict[str, float]) -> float:
    return max(0.0, 1 - counters["busy_seconds"] / counters["wall_seconds"])
