"""A request goes to the coordinator that has the least to do before its first token."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

from cluster.core.membership import Member
from cluster.ingress.router.choice import (
    BLOCK_BYTES,
    RUNNING_BLOCKS,
    PrefixMemory,
    choose,
    prefix_hashes,
)
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.clusters.coordinators import coordinator

A, B, C = (coordinator(name, f"127.0.0.1:{port}") for port, name in enumerate("abc", 1))
PRESENT = ("a", "b", "c")


def text_request(text: str, salt: str = "") -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=text, cache_salt=salt)


def long_text(seed: int, blocks: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh", k=blocks * BLOCK_BYTES))


def chosen(hashes: tuple[bytes, ...], views: list[Member], memory: PrefixMemory, **in_flight: int) -> str:
    view = choose(hashes, views, in_flight, memory)
    assert view is not None
    return view.id


def test_a_prompt_goes_where_its_beginning_was_sent_before() -> None:
    memory, start = PrefixMemory(), long_text(1, 20)
    for name in PRESENT:
        memory = PrefixMemory()
        memory.record(prefix_hashes(text_request(start)), name, PRESENT)
        assert chosen(prefix_hashes(text_request(start + "and more")), [A, B, C], memory) == name
        assert memory.matches(prefix_hashes(text_request(start + "and more"))) == {name: 20}


def test_the_longest_known_beginning_wins() -> None:
    memory, start = PrefixMemory(), long_text(2, 20)
    memory.record(prefix_hashes(text_request(start[: 4 * BLOCK_BYTES])), "a", PRESENT)
    memory.record(prefix_hashes(text_request(start)), "b", PRESENT)
    assert chosen(prefix_hashes(text_request(start + "more")), [A, B, C], memory) == "b"


def test_load_outweighs_a_short_known_beginning_and_not_a_long_one() -> None:
    memory = PrefixMemory()
    short, long = (prefix_hashes(text_request(long_text(seed, count))) for seed, count in ((3, 2), (4, 40)))
    for hashes in (short, long):
        memory.record(hashes, "a", PRESENT)
    assert chosen(short, [A, B], memory, a=RUNNING_BLOCKS) == "b"
    assert chosen(long, [A, B], memory, a=9 * RUNNING_BLOCKS) == "a"
    assert chosen(long, [A, B], memory, a=11 * RUNNING_BLOCKS) == "b"


def test_the_queue_the_running_sequences_and_the_kv_usage_count_as_load() -> None:
    memory, idle = PrefixMemory(), coordinator("z", "127.0.0.1:9")
    for busy in (
        coordinator("x", "127.0.0.1:8", waiting=1),
        coordinator("x", "127.0.0.1:8", running=1),
        coordinator("x", "127.0.0.1:8", kv_usage=0.2),
    ):
        for seed in range(8):
            assert chosen(prefix_hashes(text_request(long_text(seed, 3))), [busy, idle], memory) == "z"
    full = coordinator("x", "127.0.0.1:8", running=4, waiting=4)
    assert chosen((), [full, coordinator("y", "127.0.0.1:7", running=7)], memory) == "y"


def test_other_salts_share_nothing() -> None:
    start = long_text(5, 10)
    one, other = prefix_hashes(text_request(start, "one")), prefix_hashes(text_request(start, "other"))
    assert not set(one) & set(other)


def test_inputs_of_other_kinds_and_orders_differ() -> None:
    chat = generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="user", content="ab")])
    swapped = generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="ab", content="user")])
    ids = common_pb2.TokenIds(ids=[1, 2, 3])
    requests = [
        text_request("ab"),
        generation_pb2.GenerateRequest(chat=chat),
        generation_pb2.GenerateRequest(chat=swapped),
        generation_pb2.GenerateRequest(token_ids=ids),
    ]
    assert len({prefix_hashes(request) for request in requests}) == 4


Turn = generation_pb2.ChatMessage


def chat_hashes(*messages: generation_pb2.ChatMessage, **values: Any) -> tuple[bytes, ...]:
    return prefix_hashes(
        generation_pb2.GenerateRequest(chat=generation_pb2.ChatInput(messages=messages, **values)),
    )


def test_messages_and_tools_make_a_chat_another_one() -> None:
    plain = Turn(role="user", content="ab")
    call = generation_pb2.ToolCall(name="swim", arguments="{}")
    chats = [
        chat_hashes(plain),
        chat_hashes(plain, tools=['{"function": {"name": "a"}}']),
        chat_hashes(plain, tools=['{"function": {"name": "b"}}']),
        chat_hashes(Turn(role="user", content_parts=["one"])),
        chat_hashes(Turn(role="user", content_parts=["two"])),
        chat_hashes(Turn(role="user", content_parts=["two", "three"])),
        chat_hashes(Turn(role="assistant", content="ab")),
        chat_hashes(Turn(role="assistant", content="ab", reasoning="so")),
        chat_hashes(Turn(role="assistant", content="ab", tool_calls=[call])),
    ]
    assert len(set(chats)) == len(chats)
    assert chat_hashes(Turn(role="user", content_parts=["ab"])) == chat_hashes(plain)


def test_variables_of_the_template_change_nothing() -> None:
    """A client that lets the model think in some turns only stays where its conversation is stored."""
    first = Turn(role="user", content=long_text(7, 5))
    plain = chat_hashes(first)
    for variables in ('{"enable_thinking": false}', '{"reasoning_effort": "high"}'):
        assert chat_hashes(first, template_arguments=variables) == plain


def test_chats_with_a_common_beginning_share_its_hashes() -> None:
    first = Turn(role="user", content_parts=[long_text(6, 5)])
    others = (Turn(role="user", content="one"), Turn(role="user", content="other"))
    one, other = (chat_hashes(first, turn, tools=["{}"]) for turn in others)
    assert one[:5] == other[:5]
    assert one != other


def test_two_ingresses_that_know_nothing_of_each_other_agree() -> None:
    for seed in range(50):
        hashes = prefix_hashes(text_request(long_text(seed, 2)))
        assert chosen(hashes, [A, B, C], PrefixMemory()) == chosen(hashes, [C, A, B], PrefixMemory())


def test_new_prompts_spread_over_all_coordinators() -> None:
    names = [chosen(prefix_hashes(text_request(long_text(seed, 2))), [A, B, C], PrefixMemory()) for seed in range(90)]
    assert min(names.count(name) for name in PRESENT) > 15


def test_excluded_coordinators_are_not_chosen() -> None:
    memory = PrefixMemory()
    memory.record((b"x",), "a", PRESENT)
    first = choose((b"x",), [A, B], {}, memory, {"a"})
    assert first is not None
    assert first.id == "b"
    assert choose((b"x",), [A, B], {}, memory, {"a", "b"}) is None
    assert choose((b"x",), [], {}, memory) is None


def test_a_resumed_request_goes_to_its_earlier_coordinator_if_that_is_there() -> None:
    memory = PrefixMemory()
    for name in ("a", "b"):
        found = choose((b"x",), [A, B], {name: 5}, memory, preferred=name)
        assert found is not None
        assert found.id == name
    found = choose((b"x",), [A, B], {"a": 5}, memory, {"b"}, preferred="b")
    assert found is not None
    assert found.id == "a"
    assert choose((b"x",), [A, B], {"a": 5}, memory, preferred="gone") == B


def test_the_memory_is_bounded_and_keeps_the_beginnings_used_last() -> None:
    memory = PrefixMemory(max_blocks=30)
    for seed in range(20):
        memory.record(prefix_hashes(text_request(long_text(seed, 10))), "a", PRESENT)
        assert len(memory) <= 30
    assert memory.matches(prefix_hashes(text_request(long_text(19, 10)))) == {"a": 10}
    assert memory.matches(prefix_hashes(text_request(long_text(0, 10)))) == {}


def test_a_coordinator_that_left_is_forgotten_where_its_prefix_is_used_again() -> None:
    memory = PrefixMemory()
    memory.record((b"x",), "gone", ("gone", "a"))
    memory.record((b"x",), "a", ("a",))
    assert memory.matches((b"x",)) == {"a": 1}


@pytest.mark.parametrize("size", [1 << 20, 4 << 20])
def test_a_huge_prompt_has_a_bounded_number_of_hashes(size: int) -> None:
    assert len(prefix_hashes(text_request("x" * size))) == 512
    ids = common_pb2.TokenIds(ids=range(size >> 4))
    assert len(prefix_hashes(generation_pb2.GenerateRequest(token_ids=ids))) == 512


STORED_BLOCKS = 90
"""Blocks that a simulated coordinator stores: those of five beginnings of eight."""


def simulated(policy: str, coordinators: int = 2, groups: int = 8, requests: int = 400) -> tuple[float, float]:
    """Share of prompt blocks found where the request went, and the largest share of requests at one coordinator.

    Groups of requests share a long beginning. Each coordinator stores what it was sent; ten requests are in flight.
    """
    draw, memory = random.Random(1), PrefixMemory()
    views = [coordinator(f"c{index}", f"127.0.0.1:{index}") for index in range(coordinators)]
    stored: dict[str, OrderedDict[bytes, None]] = {view.id: OrderedDict() for view in views}
    running: list[str] = []
    counts = dict.fromkeys(stored, 0)
    found = total = 0
    for number in range(requests):
        text = long_text(draw.randrange(groups), 16) + long_text(1000 + number, 2)
        hashes = prefix_hashes(text_request(text))
        in_flight = {name: RUNNING_BLOCKS * running.count(name) for name in stored}
        is_routed = policy == "routed"
        name = chosen(hashes, views, memory, **in_flight) if is_routed else views[number % coordinators].id
        memory.record(hashes, name, list(stored))
        found += sum(digest in stored[name] for digest in hashes)
        total += len(hashes)
        for digest in hashes:
            stored[name][digest] = None
            stored[name].move_to_end(digest)
        while len(stored[name]) > STORED_BLOCKS:
            stored[name].popitem(last=False)
        counts[name] += 1
        running = [*running[-9:], name]
    return found / total, max(counts.values()) / requests


def test_routing_finds_more_stored_prefixes_than_round_robin_and_stays_balanced() -> None:
    routed, round_robin = simulated("routed"), simulated("round robin")
    assert routed[0] > 1.3 * round_robin[0]
    assert routed[1] < 0.7
