"""The turns of flows: equal shares, no wait without end, and nobody before those that started."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.fair_queue import (
    EXPECTED_ANSWER_TOKENS,
    FairQueue,
    QueuedRequest,
    displaced,
    expected_cost,
    flow_of,
)
from cluster.core.ids import RequestId


def test_two_flows_take_turns_however_many_sequences_one_sends() -> None:
    queue = FairQueue()
    turns = []
    for number in range(16):
        turn, queue = queue.enter("many", 100)
        turns.append((turn, "many", number))
    for number in range(3):
        turn, queue = queue.enter("few", 100)
        turns.append((turn, "few", number))
    order = [name for _, name, _ in sorted(turns, key=lambda one: one[0])]
    assert order[:6] == ["many", "few"] * 3


def test_shares_are_of_tokens_and_not_of_sequences() -> None:
    queue = FairQueue()
    turns = []
    for _ in range(20):
        turn, queue = queue.enter("long", 400)
        turns.append((turn, "long"))
        turn, queue = queue.enter("short", 100)
        turns.append((turn, "short"))
    first = Counter(name for _, name in sorted(turns)[:20])
    assert first == {"short": 16, "long": 4}


def test_a_flow_that_has_waited_for_nothing_has_saved_nothing() -> None:
    queue = FairQueue()
    for _ in range(5):
        turn, queue = queue.enter("busy", 100)
        queue = queue.start(turn, 100, 1)
    late, queue = queue.enter("late", 100)
    next_busy, _ = queue.enter("busy", 100)
    assert late == next_busy == 500


def test_a_sequence_starts_although_new_flows_never_end() -> None:
    queue = FairQueue()
    _, queue = queue.enter("patient", 100)
    waiting, queue = queue.enter("patient", 100)
    for number in range(1000):
        turn, queue = queue.enter(f"new-{number}", 100)
        if (turn, 1) > (waiting, 0):
            break
        queue = queue.start(turn, 100, 2)
    assert number < 5


def test_answers_count_by_what_can_be_expected() -> None:
    assert expected_cost(10, 5) == 15
    assert expected_cost(10, 100_000) == 10 + EXPECTED_ANSWER_TOKENS


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.sampled_from("abcd"), st.integers(1, 500)),
            st.tuples(st.just("start"), st.just(""), st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_order_is_that_of_turns_whatever_comes(steps: list[tuple[str, str, int]]) -> None:
    queue = FairQueue()
    waiting: list[tuple[int, int, str, int]] = []
    started: list[tuple[int, int]] = []
    for number, (kind, flow, cost) in enumerate(steps):
        if kind == "enter":
            turn, queue = queue.enter(flow, cost)
            # Nobody who comes later precedes one that has started, and a flow's own order is kept.
            assert all((turn, number) > one for one in started)
            assert all((turn, number) > (other, at) for other, at, name, _ in waiting if name == flow)
            waiting.append((turn, number, flow, cost))
        elif waiting:
            waiting.sort()
            turn, at, _, cost = waiting[0]
            flows = len({name for _, _, name, _ in waiting})
            del waiting[0]
            before = queue.now
            queue = queue.start(turn, cost, flows)
            started.append((turn, at))
            assert queue.now > before
            assert started == sorted(started)
    assert set(queue.used) <= set("abcd")
    assert all(used > queue.now for used in queue.used.values())


def queued(flow: str, number: int, slots: int = 1, *, has_begun: bool = False) -> QueuedRequest:
    return QueuedRequest(RequestId(f"{flow}-{number}"), flow, slots, has_begun)


def test_a_full_queue_gives_up_the_latest_of_the_flow_that_holds_most() -> None:
    hog = [queued("hog", number, 16, has_begun=number == 0) for number in range(17)]
    requests = [*hog, queued("alice", 0), queued("bob", 0)]
    assert displaced(requests, "carol", 1, 1) == ("hog-16",)
    assert displaced(requests, "carol", 17, 17) == ("hog-16", "hog-15")
    assert displaced(requests, "alice", 1, 1) == ("hog-16",)
    assert displaced(requests, "hog", 1, 1) == ()


def test_nobody_is_displaced_who_would_then_have_less_than_the_new_one() -> None:
    assert displaced([queued("a", 0, 16), queued("b", 0, 16)], "c", 1, 1) == ()
    assert displaced([queued("a", 0), queued("a", 1)], "b", 1, 1) == ("a-1",)
    assert displaced([queued("a", 0), queued("a", 1)], "b", 2, 1) == ()


def test_a_request_that_has_begun_is_never_displaced() -> None:
    assert displaced([queued("a", number, has_begun=True) for number in range(9)], "b", 1, 1) == ()


def test_prompts_of_one_http_request_are_one_flow_unless_clients_have_names() -> None:
    assert flow_of("", RequestId("ab-0")) == flow_of("", RequestId("ab-16")) == flow_of("", RequestId("ab"))
    assert flow_of("", RequestId("ab")) != flow_of("", RequestId("cd"))
    assert flow_of("alice", RequestId("alice/ab-0")) == flow_of("alice", RequestId("alice/cd")) == "alice"
    assert flow_of("", RequestId("alice")) != flow_of("alice", RequestId("alice/x"))


def test_a_flow_that_leaves_without_a_start_has_used_nothing() -> None:
    first, queue = FairQueue().enter("a", 1000)
    again, _ = queue.leave("a").enter("a", 1000)
    assert first == again
