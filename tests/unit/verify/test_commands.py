"""All ranks take one way for commands: sockets where each reaches rank 0, else broadcasts.

Neither hides that a rank has died.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from cluster.core.config.target_section import TargetSection
from tests.support.engines.rank_processes import Ranks, running_ranks

pytestmark = pytest.mark.slow

RANKS, LAST = 3, 2
SECONDS = 60.0
BROADCASTS = {"reaches rank 0": (0, 0), "does not reach rank 0": (1, 2)}
"""What the last rank does, and how many broadcasts a short and a long command take."""
SHORT, LONG = (8 << 10) - 16, (8 << 10) - 15
"""Lengths of payloads: the longest that is broadcast at once, and the shortest that is not."""


def connect_as(situation: str, name: int, rank: int) -> Any:
    """What `command_sockets.connect` does for the last rank."""
    from workers.verify import command_sockets

    if situation == "does not reach rank 0":
        return None
    return command_sockets.connect(name, 1 if situation == "names another rank" else rank)


def serve_rank(rank: int, situation: str, port: int, pipe: Connection) -> None:
    """Run one rank. It sends its way, then rank 0 what each command took, and the others each command; errors last."""
    from unittest.mock import Mock

    import torch
    from torch import distributed

    from workers.verify import commands
    from workers.verify.group import join_group

    torch.set_num_threads(1)
    join_group(TargetSection(device="cpu", tensor_parallel=RANKS), rank, "127.0.0.1", port)
    if rank == LAST:
        pytest.MonkeyPatch().setattr(commands, "connect", lambda name, rank: connect_as(situation, name, rank))
    distributed.broadcast = broadcast = Mock(wraps=distributed.broadcast)
    try:
        way = commands.connect_commands(SECONDS)
        pipe.send(type(way).__name__)
        while rank == 0:
            command, payload = pipe.recv()
            before = broadcast.call_count
            way.send(command, payload)
            pipe.send(broadcast.call_count - before)
        while True:
            pipe.send(way.receive(way.wait()))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    pipe.recv()  # so that the death of one rank alone is what the others notice
    os._exit(0)


@pytest.fixture
def ranks(situation: str) -> Iterator[Ranks]:
    with running_ranks(RANKS, serve_rank, situation) as ranks:
        yield ranks


def send(ranks: Ranks, command: int, payload: bytes) -> Any:
    """Let rank 0 send a command. Returns how many broadcasts it took, or rank 0's error as text."""
    ranks.pipes[0].send((command, payload))
    return ranks.answer(0)


@pytest.mark.parametrize(("situation", "broadcasts"), BROADCASTS.items())
def test_commands_come_whole_and_in_order_until_a_rank_dies(ranks: Ranks, broadcasts: tuple[int, int]) -> None:
    way = "Broadcasts" if any(broadcasts) else "CommandSockets"
    assert ranks.answers() == [way] * RANKS
    for command, length in enumerate((SHORT, LONG, 0, 1 << 20, 1)):
        payload = os.urandom(length)
        assert send(ranks, command, payload) == broadcasts[length > SHORT]
        assert [ranks.answer(rank) for rank in range(1, RANKS)] == [(command, payload)] * (RANKS - 1)

    ranks.kill(LAST)
    deadline = time.monotonic() + SECONDS
    while not isinstance(failed := send(ranks, 9, b""), str):  # the operating system may take a broadcast before
        assert way == "Broadcasts"
        assert time.monotonic() < deadline
        assert ranks.answer(1) == (9, b"")
    ranks.kill(0)
    while not isinstance(ended := ranks.answer(1), str):
        assert ended == (9, b"")
    if way == "CommandSockets":
        assert failed.startswith("AnotherRankFailed: rank 2 has ended")
        assert ended.startswith("AnotherRankFailed: rank 0 has ended")
    else:
        assert failed.startswith("RuntimeError")
        assert ended.startswith("RuntimeError")


@pytest.mark.parametrize("situation", ["names another rank"])
def test_ranks_that_cannot_connect_fail_together_and_rank_0_says_why(ranks: Ranks) -> None:
    assert ranks.answer(0) == "ConnectionError: ranks [2] have not connected to rank 0 for commands"
    assert [ranks.answer(rank) for rank in range(1, RANKS)] == ["AnotherRankFailed: another rank has failed"] * 2
