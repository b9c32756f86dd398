"""Commands go over sockets whole and in order. A dead rank ends the wait of others, and a stranger changes nothing."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from unittest.mock import Mock

import pytest

from workers.ranks import AnotherRankFailed
from workers.verify import command_sockets
from workers.verify.command_sockets import HEADER, CommandSockets, accept, connect, listen

RANKS = 3
SECONDS, SHORT_SECONDS = 20.0, 0.05
LARGE = secrets.token_bytes(3 << 20)
"""More than a socket's buffer holds."""
STRANGERS = {
    "silent": b"",
    "unfinished": b"12",
    "rank 0": struct.pack("<Q", 0),
    "a rank of a larger group": struct.pack("<Q", RANKS),
    "a rank that has connected": struct.pack("<Q", 1),
}
"""What a process says that is none of the missing ranks."""


class Meeting:
    """Rank 0's listener, and those who have connected, each end closed with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self.name = secrets.randbits(62)
        listener = listen(self.name)
        assert listener is not None
        self.listener = stack.enter_context(listener)
        self._stack = stack

    def connect(self, rank: int) -> socket.socket:
        connection = connect(self.name, rank)
        assert connection is not None
        return self._stack.enter_context(connection)

    def connect_stranger(self, said: bytes) -> socket.socket:
        connection = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(SECONDS)
        connection.connect(command_sockets._address(self.name))
        connection.sendall(said)
        return connection

    def accept(self, ranks: int = RANKS, seconds: float = SECONDS) -> CommandSockets:
        return self._stack.enter_context(closing(CommandSockets(accept(self.listener, ranks), seconds)))


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with ExitStack() as stack:
        yield Meeting(stack)


def connect_all(meeting: Meeting, seconds: float = SECONDS) -> list[CommandSockets]:
    """The ends of all ranks."""
    others = [CommandSockets({0: meeting.connect(rank)}, seconds) for rank in range(1, RANKS)]
    return [meeting.accept(seconds=seconds), *others]


def test_each_rank_reads_all_commands_in_order(meeting: Meeting) -> None:
    first, *others = connect_all(meeting)
    sent = [(number % 7, bytes([number]) * number) for number in range(60)]
    for command, payload in sent:
        first.send(command, payload)
    for other in others:
        assert [other.receive(other.wait()) for _ in sent] == sent


def test_a_command_larger_than_the_buffer_comes_whole_to_ranks_that_read(meeting: Meeting) -> None:
    first, *others = connect_all(meeting)
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(first.send, 4, LARGE)
        for other in others:
            assert other.receive(other.wait()) == (4, LARGE)
        sending.result(SECONDS)
    first.send(5, b"next")
    assert [other.receive(other.wait()) for other in others] == [(5, b"next")] * 2


def test_what_rank_0_has_sent_is_read_before_its_end_is_noticed(meeting: Meeting) -> None:
    first, *others = connect_all(meeting)
    first.send(4, b"last")
    first.close()
    first.close()
    for other in others:
        assert other.receive(other.wait()) == (4, b"last")
        with pytest.raises(AnotherRankFailed, match="rank 0 has ended"):
            other.wait()


def test_the_end_of_rank_0_ends_a_wait_that_has_begun(meeting: Meeting) -> None:
    first, other, _ = connect_all(meeting)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(other.wait)
        time.sleep(SHORT_SECONDS)
        assert not waiting.done()
        first.close()
        with pytest.raises(AnotherRankFailed, match="rank 0 has ended"):
            waiting.result(SECONDS)


def test_the_next_command_fails_once_a_rank_has_ended(meeting: Meeting) -> None:
    first, _, last = connect_all(meeting)
    last.close()
    with pytest.raises(AnotherRankFailed, match="rank 2 has ended"):
        first.send(1, b"")


def test_a_rank_that_does_not_read_holds_rank_0_no_longer_than_its_bound(meeting: Meeting) -> None:
    first, *_ = connect_all(meeting, SHORT_SECONDS)
    begun = time.monotonic()
    with pytest.raises(AnotherRankFailed, match="rank 1 has ended, or reads no commands: timed out"):
        first.send(1, LARGE)
    assert SHORT_SECONDS <= time.monotonic() - begun < SECONDS


def test_one_bound_holds_for_sending_to_all_ranks() -> None:
    slow, next_one = Mock(), Mock()
    slow.sendall.side_effect = lambda message: time.sleep(SHORT_SECONDS)
    CommandSockets({1: slow, 2: next_one}, SECONDS).send(1, b"")
    (left,) = next_one.settimeout.call_args.args
    assert 0 < left <= SECONDS - SHORT_SECONDS


def test_the_rest_of_a_command_has_a_bound_and_its_beginning_has_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as thread:
        other = CommandSockets({0: theirs}, SHORT_SECONDS)
        waiting = thread.submit(other.wait)
        time.sleep(2 * SHORT_SECONDS)
        ours.sendall(HEADER.pack(2, 100) + b"not a hundred bytes")
        beginning = waiting.result(SECONDS)
        begun = time.monotonic()
        with pytest.raises(AnotherRankFailed, match="sends no more: timed out"):
            other.receive(beginning)
        assert time.monotonic() - begun >= SHORT_SECONDS
        ours.close()
        with pytest.raises(AnotherRankFailed, match="rank 0 has ended"):
            other.receive(beginning)


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_a_process_that_is_no_missing_rank_is_refused_and_the_ranks_connect(meeting: Meeting, said: bytes) -> None:
    one = CommandSockets({0: meeting.connect(1)}, SECONDS)
    stranger = meeting.connect_stranger(said)
    two = CommandSockets({0: meeting.connect(2)}, SECONDS)
    meeting.accept().send(3, b"for ranks alone")
    assert [rank.receive(rank.wait()) for rank in (one, two)] == [(3, b"for ranks alone")] * 2
    assert stranger.recv(1) == b""


def test_a_process_of_another_user_is_refused_whatever_it_says(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = meeting.connect_stranger(struct.pack("<Q", 1))
    one = CommandSockets({0: meeting.connect(1)}, SECONDS)
    users = iter((os.geteuid() + 1, os.geteuid()))
    monkeypatch.setattr(command_sockets, "_user_of", lambda connection: next(users))
    meeting.accept(ranks=2).send(3, b"for ranks alone")
    assert one.receive(one.wait()) == (3, b"for ranks alone")
    with pytest.raises(ConnectionResetError):  # nobody has read what it says
        stranger.recv(1)


def test_a_rank_does_not_connect_to_a_listener_of_another_user(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_sockets, "_user_of", lambda connection: os.geteuid() + 1)
    assert connect(meeting.name, 1) is None


def test_rank_0_does_not_wait_for_a_rank_that_is_missing(meeting: Meeting) -> None:
    meeting.connect(1)
    with pytest.raises(ConnectionError, match=r"ranks \[2\] have not connected to rank 0"):
        meeting.accept()
    assert connect(meeting.name, 2) is None


def test_a_rank_finds_no_listener_of_another_name_and_a_name_has_one_listener(meeting: Meeting) -> None:
    assert connect(meeting.name ^ 1, 1) is None
    assert listen(meeting.name) is None
