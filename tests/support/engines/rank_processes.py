"""Processes for the ranks of a group.

They are forked from a server that has imported the libraries of the models, and so start without importing them again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from workers.serve.node import free_port

LONGEST_SECONDS = 120.0
"""Longest wait for an answer of a rank."""
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


@dataclass
class Ranks:
    """Running ranks, and this process's ends of their pipes."""

    processes: list[BaseProcess]
    pipes: list[Connection]

    def answer(self, rank: int) -> Any:
        """What a rank says next, or its error. Raises `TimeoutError` if it says nothing, `EOFError` if it has ended."""
        if not self.pipes[rank].poll(LONGEST_SECONDS):
            raise TimeoutError(f"rank {rank} has not answered for {LONGEST_SECONDS:g} s")
        answer = self.pipes[rank].recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answers(self) -> list[Any]:
        """What each rank says next."""
        return [self.answer(rank) for rank in range(len(self.pipes))]

    def ask(self, called: str, *arguments: object) -> Any:
        """Let rank 0 call what has this name. Returns its answer, or raises its error."""
        self.pipes[0].send((called, arguments))
        return self.answer(0)

    def kill(self, rank: int) -> None:
        """Kill the process of a rank."""
        self.processes[rank].kill()
        self.processes[rank].join()


@contextmanager
def running_ranks(count: int, run: Callable[..., None], *arguments: object) -> Iterator[Ranks]:
    """Processes in which rank `i` calls `run(i, *arguments, port, pipe)`. They are killed at the end."""
    port, pairs = free_port("127.0.0.1"), [Pipe() for _ in range(count)]
    processes = start_ranks(run, [(*arguments, port, theirs) for _, theirs in pairs])
    for _, theirs in pairs:
        theirs.close()  # so that this process notices the end of a rank
    ranks = Ranks(processes, [ours for ours, _ in pairs])
    try:
        yield ranks
    finally:
        for rank, pipe in enumerate(ranks.pipes):
            pipe.close()
            ranks.kill(rank)
