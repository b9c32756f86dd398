"""The link that disturbs messages in tests: what it forwards, and what each kind of fault looks like to a client."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.core.errors import InvalidRequest, TargetUnavailable
from cluster.core.verification import StepBatch
from cluster.wire.connection import fixed_address
from cluster.wire.target_client import GrpcTarget
from tests.support.clusters.faulty_link import FaultRates, FaultyLink
from tests.support.fakes.echo_workers import EchoEngine, open_row, verify_row
from workers.serve.worker_server import host_target

BATCH = StepBatch((verify_row("a", 1, 2),))


@asynccontextmanager
async def linked(engine: EchoEngine, rates: FaultRates) -> AsyncIterator[tuple[GrpcTarget, FaultyLink]]:
    """A client of a target behind a link."""
    async with host_target("127.0.0.1", engine) as host:
        link = FaultyLink(fixed_address(host.address), random.Random(0))
        target = GrpcTarget(fixed_address(await link.start()), step_timeout_seconds=1.0)
        link.rates = rates
        yield target, link
        await target.close()
        await link.stop()


async def test_an_undisturbed_link_forwards_streams_calls_and_errors() -> None:
    engine = EchoEngine()
    async with linked(engine, FaultRates()) as (target, _):
        assert (await target.info()).model == "echo"
        assert [(await target.step(BATCH)).verdicts[0].tokens for _ in range(3)] == [(2,)] * 3
        with pytest.raises(InvalidRequest, match="a sequence that the target stores"):
            await target.open([open_row("b", 1)])
    assert engine.sizes == [1, 1, 1]


async def test_a_repeated_message_is_computed_twice_and_answered_once() -> None:
    engine = EchoEngine()
    async with linked(engine, FaultRates(repeat=1.0)) as (target, link):
        assert (await target.step(BATCH)).verdicts[0].tokens == (2,)
        assert link.counts["repeat"] == 1
    assert engine.sizes == [1, 1]


async def test_a_lost_message_makes_the_client_wait_for_its_timeout() -> None:
    engine = EchoEngine()
    async with linked(engine, FaultRates(drop=1.0)) as (target, _):
        with pytest.raises(TargetUnavailable, match="no answer within"):
            await target.step(BATCH)
    assert engine.sizes == []


async def test_a_cut_connection_and_a_server_that_is_away_are_unavailable() -> None:
    async with linked(EchoEngine(), FaultRates(cut=1.0)) as (target, link):
        with pytest.raises(TargetUnavailable, match="cut"):
            await target.step(BATCH)
        link.rates = FaultRates(delay=1.0, longest_delay=0.01)
        assert (await target.step(BATCH)).verdicts[0].tokens == (2,)
        assert link.counts["delay"] == 2


async def test_a_link_finds_a_server_that_has_another_address() -> None:
    async with host_target("127.0.0.1", EchoEngine()) as first, host_target("127.0.0.1", EchoEngine()) as second:
        addresses = [first.address]

        async def resolve() -> str:
            if not addresses:
                raise ConnectionError("it is not serving")
            return addresses[-1]

        link = FaultyLink(resolve, random.Random(0))
        target = GrpcTarget(fixed_address(await link.start()))
        assert (await target.info()).model == "echo"
        addresses.clear()
        with pytest.raises(TargetUnavailable, match="it is not serving"):
            await target.info()
        addresses.append(second.address)
        await first.stop()
        assert (await target.info()).model == "echo"
        await target.close()
        await link.stop()
