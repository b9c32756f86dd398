"""The order of sequences that wait, and what it costs to look at the first of them."""

from __future__ import annotations

import random
from dataclasses import replace

from cluster.coordinator.requests.decoding_strategy import ParallelSampling
from cluster.coordinator.requests.delivery import Delivery
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable, Turns
from cluster.core.ids import SequenceId
from cluster.core.request import Commit, FinishReason, GeneratedPart, Usage
from tests.support.fakes.fake_cluster import request


def live_request(index: int, priority: int, clients: int) -> LiveRequest:
    wanted = replace(request(f"r{index}"), client=f"c{index % clients}", priority=priority)
    return LiveRequest(wanted, ParallelSampling(wanted), index, 0.0, Delivery())


def test_the_first_that_wait_are_the_same_however_requests_come_start_and_leave() -> None:
    draw = random.Random(5)
    table, live = RequestTable(), list[LiveRequest]()
    for index in range(600):
        live.append(live_request(index, draw.randrange(3), clients=7))
        table.add(live[-1])
        while draw.random() < 0.45 and live:
            table.remove(live.pop(draw.randrange(len(live))))
        if draw.random() < 0.2 and (first := next(table.waiting(1), None)) is not None:
            table.admit(first.id, 0.0)
        waiting = [one for one in table.sequences() if one.id not in table.running]
        expected = sorted(waiting, key=lambda one: one.order)
        most = draw.randrange(1, 40)
        assert [one.id for one in table.waiting(most)] == [one.id for one in expected[:most]]
        assert len(table._new_in_order) <= 2 * len(expected) + 65
    assert len(expected) > 40


def test_a_request_has_begun_also_if_its_first_answer_has_ended_and_the_others_wait() -> None:
    parts = (GeneratedPart((5,)), GeneratedPart((6,)))
    wanted = replace(request("r", n=2), resumed=parts)
    live, table = LiveRequest(wanted, ParallelSampling(wanted), 0, 0.0, Delivery()), RequestTable()
    table.add(live)
    (first,) = table.waiting(1)
    table.admit(first.id, 0.0)
    table.start(live, live.strategy.advance(0, Commit((7,), 0, finish=FinishReason.STOP, usage=Usage(5))).sequences)
    table.finish(first)
    assert table.take_released() == [first]
    assert [one.answer for one in live.sequences] == [1]
    (queued,) = table.queued()
    assert queued.has_begun


def test_a_client_that_cancels_what_waits_has_used_what_has_started() -> None:
    turns = Turns()
    for name, flow in (("a0", "hog"), ("b0", "other")):
        turns.give(SequenceId(name), flow, 1000)
    turns.start(SequenceId("a0"))
    assert turns.give(SequenceId("a1"), "hog", 1000) == 1000
    turns.leave(SequenceId("a1"))
    assert turns.give(SequenceId("a2"), "hog", 1000) == 1000  # not the present time, which is 500


def test_what_leaves_without_a_start_has_used_nothing_also_while_others_of_its_client_wait() -> None:
    turns = Turns()
    assert [turns.give(SequenceId(f"a{number}"), "a", 100) for number in range(4)] == [0, 100, 200, 300]
    turns.leave(SequenceId("a3"))
    turns.leave(SequenceId("a1"))  # a3 has gone, so the turn of a2 is the last
    assert turns.give(SequenceId("a4"), "a", 100) == 300
    turns.leave(SequenceId("a4"))
    turns.leave(SequenceId("a2"))
    assert turns.give(SequenceId("a5"), "a", 100) == 100


def test_turns_follow_what_has_started_and_what_waits_whatever_comes_starts_and_leaves() -> None:
    draw, turns = random.Random(3), Turns()
    waiting: list[tuple[int, int, str, int]] = []
    started: list[tuple[int, str, int]] = []
    now = left = 0
    for number in range(2000):
        action = draw.random()
        if action < 0.5:
            flow, cost = draw.choice("abc"), draw.randrange(1, 500)
            ends = [at + used for at, _, name, used in waiting if name == flow]
            ends += [at + used for at, name, used in started if name == flow]
            turn = turns.give(SequenceId(str(number)), flow, cost)
            assert turn == max([now, *ends])
            waiting.append((turn, number, flow, cost))
        elif waiting and action < 0.75:
            at, known, flow, cost = min(waiting)
            now = max(now, at) + -(-cost // len({name for _, _, name, _ in waiting}))
            waiting.remove((at, known, flow, cost))
            started.append((at, flow, cost))
            turns.start(SequenceId(str(known)))
        elif waiting:
            gone = waiting.pop(draw.randrange(len(waiting)))
            turns.leave(SequenceId(str(gone[1])))
            left += 1
    assert left > 100 and len(started) > 100
    for _, known, _, _ in waiting:
        turns.leave(SequenceId(str(known)))
    assert (turns._waiting, turns._flows) == ({}, {})
    assert len(turns._started) <= 3
