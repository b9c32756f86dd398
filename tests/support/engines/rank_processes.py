"""Processes for the ranks of a group.

They are forked from a server that has imported the libraries of the models, and so start without importing them again.
"""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

_LIBRARIES = ["workers.verify.build", "workers.verify.group", "tests.support.models.tiny"]


def forking() -> ForkServerContext:
    """The context in which ranks start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    return context


def start_ranks(run: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> list[BaseProcess]:
    """Start one process per rank. Rank `i` calls `run(i, *arguments[i])`."""
    processes: list[BaseProcess] = []
    for rank, one in enumerate(arguments):
        process = forking().Process(target=run, args=(rank, *one))
        process.start()
        processes.append(process)
    return processes


def end_ranks(processes: Sequence[BaseProcess]) -> None:
    """Wait for processes that were told to end, and kill those that do not."""
    for process in processes:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Group:
    """Ranks of which the first executes calls that it receives through a pipe."""

    pipe: Connection
    processes: list[Any]

    def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of rank 0. Returns its answer, or raises its error."""
        self.pipe.send((method, arguments))
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def form_next(self) -> None:
        """Close the group. The same processes then form the group of the next kind."""
        self.ask("close")
        assert self.pipe.recv() == "ready"
