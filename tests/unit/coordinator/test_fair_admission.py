"""No client owns the queue: clients take turns, and a full queue gives up requests of the one that holds most."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.core.errors import Overloaded
from cluster.core.ids import RequestId, scoped_request_id
from cluster.core.request import BeamParameters, GenerationRequest
from tests.support.fakes.fake_cluster import read, request, serving, until
from tests.support.fakes.fake_drafters import WrongDrafter
from tests.support.fakes.fake_target import FakeTarget

ONE_AT_A_TIME = {"scheduler__max_sequences": 1}


def of(client: str, number: int, max_tokens: int = 5) -> GenerationRequest:
    name = scoped_request_id(client, f"r{number}")
    return replace(request(name, max_tokens=max_tokens), client=client)


async def order_of_ends(coordinator: Coordinator, wanted: list[GenerationRequest]) -> list[str]:
    """The clients in the order in which their answers ended. The requests arrive in the order given."""
    ended: list[str] = []

    async def answer(one: GenerationRequest) -> None:
        await read(coordinator, one)
        ended.append(one.client or one.request_id)

    tasks = [asyncio.create_task(answer(one)) for one in wanted]
    await asyncio.gather(*tasks)
    return ended


async def test_clients_take_turns_however_many_requests_one_has_sent() -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target), **ONE_AT_A_TIME) as coordinator:
        wanted = [*(of("hog", number) for number in range(8)), *(of("late", number) for number in range(3))]
        ended = await order_of_ends(coordinator, wanted)
    assert ended[:6] == ["hog", "late"] * 3
    assert sorted(ended) == ["hog"] * 8 + ["late"] * 3


async def test_without_names_the_prompts_of_one_request_wait_for_other_requests() -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target), **ONE_AT_A_TIME) as coordinator:
        wanted = [*(request(f"hog-{number}", max_tokens=5) for number in range(6)), request("late", max_tokens=5)]
        ended = await order_of_ends(coordinator, wanted)
    assert ended.index("late") <= 1


async def test_samples_of_one_request_wait_for_other_requests_and_all_end() -> None:
    target = FakeTarget()
    limits = {"scheduler__max_sequences": 4}
    async with serving(target, WrongDrafter(target), **limits) as coordinator:
        wanted = [replace(of("hog", 0, 30), n=4), replace(of("hog", 1, 30), n=4), of("late", 0)]
        ended = await order_of_ends(coordinator, wanted)
    assert ended[0] == "late"
    assert sorted(ended) == ["hog", "hog", "late"]


async def test_beams_of_one_search_have_one_turn() -> None:
    target = FakeTarget()
    async with serving(target, WrongDrafter(target), scheduler__max_sequences=3) as coordinator:
        beams = replace(of("beams", 0, 8), n=2, beam=BeamParameters(width=3))
        ended = await order_of_ends(coordinator, [beams, *(of("other", number) for number in range(3))])
    assert sorted(ended) == ["beams", "other", "other", "other"]


async def test_a_full_queue_gives_up_the_latest_request_of_the_client_that_holds_most() -> None:
    target = FakeTarget(step_delay=0.001)
    limits = {"scheduler__max_sequences": 1, "scheduler__max_waiting": 3}
    async with serving(target, WrongDrafter(target), **limits) as coordinator:
        running = asyncio.create_task(read(coordinator, of("hog", 0, 400)))
        await until(lambda: len(target.batches) > 0)
        waiting = [asyncio.create_task(read(coordinator, of("hog", number))) for number in range(1, 4)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            coordinator.check_room("hog", RequestId("hog/more"), 1)
        coordinator.check_room("late", RequestId("late/r0"), 1)
        late = asyncio.create_task(read(coordinator, of("late", 0)))
        with pytest.raises(Overloaded):
            await waiting[2]
        assert not waiting[0].done() and not waiting[1].done()
        coordinator.abort(of("hog", 0).request_id)
        await running
        assert (await late)[-1].finish is not None
        assert all(commits[-1].finish is not None for commits in await asyncio.gather(*waiting[:2]))
