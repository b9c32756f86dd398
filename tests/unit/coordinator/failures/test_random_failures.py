"""Random requests, clients and failures at the same time.

Every client that stays connected reads the right tokens, and in the end no KV is held.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.request import EarlyStopping, GenerationRequest
from tests.support.fakes.beam_requests import beam_answers, beam_request
from tests.support.fakes.fake_cluster import TOO_LONG_SECONDS, answers_of, configure, read, request, until, value_of
from tests.support.fakes.fake_drafters import (
    FailingDrafter,
    FakeDrafter,
    ForgetfulDrafter,
    InvalidDrafter,
    PerfectDrafter,
    RandomDrafter,
    WrongDrafter,
)
from tests.support.fakes.fake_target import FakeTarget

CLIENTS = 14


@dataclass(slots=True)
class RandomCluster:
    """A random target, a random drafter, and random clients."""

    rng: random.Random
    target: FakeTarget = field(init=False)
    drafter: FakeDrafter = field(init=False)
    common: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        block_size = rng.choice([3, 4, 16])
        blocks = rng.choice([72, 100, 600]) // block_size
        self.target = FakeTarget(
            block_size=block_size, blocks=blocks, step_delay=rng.choice([0, 0.0003]), prefix_cache=rng.random() < 0.6
        )
        self.drafter = rng.choice(
            [WrongDrafter, PerfectDrafter, RandomDrafter, ForgetfulDrafter, InvalidDrafter, FailingDrafter]
        )(self.target)
        self.common = [rng.randrange(32) for _ in range(30)]

    def random_request(self, index: int) -> GenerationRequest:
        """A request that fits into the pool and often shares a prefix with others."""
        rng = self.rng
        prompt = self.common[: rng.randrange(1, 20)] + [rng.randrange(32) for _ in range(rng.randrange(4))]
        longest = min(rng.randrange(1, 40), self.target.blocks * self.target.memory.block_size - len(prompt))
        stop = frozenset(rng.sample(range(32), rng.randrange(3)))
        if rng.random() < 0.25:
            width = rng.randrange(2, 6)
            early = rng.choice(list(EarlyStopping))
            return beam_request(f"r{index}", prompt, min(longest, 12), width=width, n=width - 1, stop=stop, early=early)
        n, salt = rng.choice([1, 1, 2, 5]), rng.choice(["", "salt"])
        temperature = rng.choice([0.0, 1.0])
        return request(f"r{index}", prompt, longest, temperature=temperature, seed=index, stop=stop, salt=salt, n=n)

    async def client(self, coordinator: Coordinator, index: int) -> None:
        """Read to the end, disconnect, abort, or conclude one answer."""
        rng, wanted = self.rng, self.random_request(index)
        await asyncio.sleep(rng.uniform(0, 0.05))
        match rng.randrange(6):
            case 0:
                reading = asyncio.create_task(read(coordinator, wanted))
                await asyncio.sleep(rng.uniform(0, 0.05))
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            case 1:
                reading = asyncio.create_task(read(coordinator, wanted))
                await asyncio.sleep(rng.uniform(0, 0.03))
                coordinator.abort(wanted.request_id)
                assert sum(commit.finish is not None for commit in await reading) == wanted.n
            case 2 if wanted.beam is None:
                await self.conclude_one(coordinator, wanted)
            case _:
                right = self.target.answers(wanted) if wanted.beam is None else beam_answers(self.target, wanted)
                assert await answers_of(coordinator, wanted) == right

    async def conclude_one(self, coordinator: Coordinator, wanted: GenerationRequest) -> None:
        """Conclude one answer and read the others to the end."""
        cut, enough = self.rng.randrange(wanted.n), self.rng.randrange(1, 10)
        answers: list[list[int]] = [[] for _ in range(wanted.n)]
        async for commit in coordinator.generate(wanted):
            answers[commit.index] += commit.tokens
            if commit.index == cut and len(answers[cut]) >= enough:
                coordinator.conclude(wanted.request_id, cut)
        right = self.target.answers(wanted)
        right[cut] = right[cut][: len(answers[cut])]
        assert answers == right

    async def fail_at_random(self) -> None:
        """The target crashes, restarts, loses an answer, or runs out of blocks for a moment; a drafter may fail."""
        for _ in range(self.rng.choice([0, 0, 15])):
            await asyncio.sleep(self.rng.uniform(0, 0.02))
            if isinstance(self.drafter, FailingDrafter):
                self.drafter.is_down = not self.drafter.is_down
            match self.rng.randrange(4):
                case 0:
                    self.target.crash()
                    await asyncio.sleep(0.002)
                    self.target.revive()
                case 1:
                    self.target.revive()
                case 2:
                    self.target.fail_after_computing = 1
                case 3:
                    self.target.memory.occupied = self.rng.randrange(6)
                    await asyncio.sleep(0.005)
                    self.target.memory.occupied = 0


@pytest.mark.parametrize("seed", range(10))
async def test_every_client_that_stays_reads_the_right_tokens_and_nothing_is_held_in_the_end(seed: int) -> None:
    cluster = RandomCluster(random.Random(seed))
    most = cluster.rng.choice([None, 1, 8])
    limits = configure(scheduler__max_prompt_tokens=most, scheduler__max_sequences=cluster.rng.choice([6, 16]))
    metrics = Metrics()
    async with (
        asyncio.timeout(TOO_LONG_SECONDS),
        Coordinator(cluster.target, [cluster.drafter], limits, metrics) as coordinator,
    ):
        clients = [cluster.client(coordinator, index) for index in range(CLIENTS)]
        await asyncio.gather(cluster.fail_at_random(), *clients)
        await until(lambda: not cluster.target.stored and not cluster.drafter.known)
    assert cluster.target.blocks_free == cluster.target.blocks
    assert value_of(metrics, "pilotfish:loop_restarts_total") == 0
