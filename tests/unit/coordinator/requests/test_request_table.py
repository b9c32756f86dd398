"""The order of sequences that wait, and what it costs to look at the first of them."""

from __future__ import annotations

import random
from dataclasses import replace

from cluster.coordinator.requests.decoding_strategy import ParallelSampling
from cluster.coordinator.requests.delivery import Delivery
from cluster.coordinator.requests.live_request import LiveRequest
from cluster.coordinator.requests.request_table import RequestTable
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
