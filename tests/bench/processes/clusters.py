"""Clusters made of processes, each on chosen cores. Several clusters share a target and take turns.

A target serves one coordinator at a time. The coordinators run one after another and hold no sequences in between, so
comparisons use the same target process, with the same weights at the same addresses.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from cluster.core.config.sections import Configuration
from deploy.implied_settings import with_implied_settings
from tests.bench.processes.role_process import Role
from tests.support.clusters.json_process import JsonProcess

START_SECONDS = 300.0
ANSWER_SECONDS = 60.0


class RoleProcess:
    """One role in a process that runs inside `with`. Raises `RuntimeError` with its last errors when it fails."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.address = ""

    def __enter__(self) -> Self:
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"} | os.environ
        threads = {"OMP_NUM_THREADS": str(self._role.threads)}
        self._process = JsonProcess(
            "tests.bench.processes.role_process", self._role.to_json(), environment=environment | threads
        )
        try:
            self.address = str(self._process.read(START_SECONDS)["address"])
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    def draft_seconds(self) -> float:
        """Time in which the process drafted since the last call."""
        return float(self._process.ask({}, ANSWER_SECONDS)["draft_seconds"])


def target(configuration: Configuration, cores: Sequence[int]) -> RoleProcess:
    """A target with a thread per core."""
    values = with_implied_settings(configuration).model_dump_json()
    return RoleProcess(Role("target", values, tuple(cores), len(cores)))


def draft(configuration: Configuration, cores: Sequence[int]) -> RoleProcess:
    """A drafter with a thread per core."""
    values = with_implied_settings(configuration).model_dump_json()
    return RoleProcess(Role("draft", values, tuple(cores), len(cores)))


def coordinator(
    configuration: Configuration, target: RoleProcess, draft: RoleProcess, delay_seconds: float = 0.0
) -> RoleProcess:
    """A coordinator with its public services, on any core. Each message to and from `draft` takes longer by a delay."""
    values = with_implied_settings(configuration).model_dump_json()
    cores, drafts = tuple(all_cores()), (draft.address,)
    return RoleProcess(Role("coordinator", values, cores, 1, target.address, drafts, delay_seconds))


def all_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class ProcessCluster:
    """A coordinator with its target and its drafter. Clients connect to the coordinator."""

    coordinator: RoleProcess
    target: RoleProcess
    draft: RoleProcess


def start_cluster(
    stack: ExitStack,
    configuration: Configuration,
    target: RoleProcess,
    drafter: RoleProcess | None = None,
    delay_seconds: float = 0.0,
) -> ProcessCluster:
    """A cluster in front of a running target. Without `drafter`, it starts one of its own on any core."""
    drafter = drafter or stack.enter_context(draft(configuration, all_cores()))
    front = coordinator(configuration, target, drafter, delay_seconds)
    return ProcessCluster(stack.enter_context(front), target, drafter)
