"""Processes for the ranks of a group.

They are forked from a server that has imported the libraries of the models, and so start without importing them again.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
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
