"""The client of the public service on real sockets: what it raises, and when answers are freed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from cluster.core.errors import (
    DeadlineExceeded,
    NotReady,
    UnknownModel,
)
from cluster.wire.generation_client import GenerationClient
from tests.support.fakes.wire_servers import GENERATION, TIMEOUT_SECONDS, Request, ScriptedServer, words
from tests.support.fakes.wire_servers import channel as channel
from tests.support.fakes.wire_servers import client as client
from tests.support.fakes.wire_servers import drafter as drafter
from tests.support.fakes.wire_servers import scripted as scripted
from tests.support.fakes.wire_servers import target as target


async def test_the_deadline_of_a_stream_ends_it_at_client_and_server(
    scripted: ScriptedServer, client: GenerationClient
) -> None:
    scripted.generator.wait = True
    received: list[str] = []
    with pytest.raises(DeadlineExceeded):
        await words(client, received, timeout_seconds=2.0)
    assert received == ["a", "b"]
    await scripted.generator.freed.wait()


async def test_leaving_the_iterator_frees_the_answer(scripted: ScriptedServer, client: GenerationClient) -> None:
    scripted.generator.wait = True
    async with aclosing(client.generate(Request(text="hi"), TIMEOUT_SECONDS)) as responses:
        await anext(responses)
        assert not scripted.generator.freed.is_set()
    await scripted.generator.freed.wait()


async def test_a_cancelled_reader_frees_the_answer(scripted: ScriptedServer, client: GenerationClient) -> None:
    scripted.generator.wait = True
    reading = asyncio.create_task(words(client))
    await scripted.generator.asked.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await scripted.generator.freed.wait()


async def test_a_reader_that_stops_reading_and_closes_frees_the_answer(
    scripted: ScriptedServer, client: GenerationClient
) -> None:
    scripted.generator.words = ["x" * 60_000] * 1000  # more than the connection holds: the servicer waits to write
    async with aclosing(client.generate(Request(text="hi"), TIMEOUT_SECONDS)) as responses:
        await anext(responses)
        await asyncio.sleep(0.05)
        assert not scripted.generator.freed.is_set()
    await scripted.generator.freed.wait()


async def test_a_running_answer_survives_the_failure_of_another_call(
    scripted: ScriptedServer, client: GenerationClient
) -> None:
    """A server that answers one call with UNAVAILABLE makes the client connect again. Other calls continue."""
    scripted.generator.wait = True
    async with aclosing(client.generate(Request(text="hi"), TIMEOUT_SECONDS)) as running:
        await anext(running)
        scripted.generator.words, scripted.generator.failure = [], NotReady("full of something")
        with pytest.raises(NotReady):
            await words(client)
        scripted.generator.failure = None
        assert (await client.list_models())[0].id == "tiny"
        assert (await anext(running)).delta.text == "b"


async def test_the_public_client_forwards_all_methods(scripted: ScriptedServer, client: GenerationClient) -> None:
    assert await client.abort("running")
    assert not await client.abort("unknown")
    assert await client.metrics() == (b"one 1\n", "text/plain")
    with pytest.raises(UnknownModel) as unknown:
        await client.get_model("x")
    assert unknown.value.field == "model"
    assert not await client.is_ready()
    await scripted.server.set_serving(GENERATION, True)
    assert await client.is_ready()
