"""`pilotfish chat` in a terminal: what Ctrl-C does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.signals import SIGNALLED
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import HttpApi
from tests.support.terminal import CTRL_C, Terminal, in_terminal


@pytest.fixture
async def api(tmp_path: Path) -> HttpApi:
    """A server whose answer stops after the first letters."""
    api = HttpApi(tmp_path, "hello the world")
    api.engine.context = 400
    api.engine.hold_after = 1
    return api


@pytest.fixture
async def terminal(api: HttpApi) -> AsyncIterator[Terminal]:
    """A conversation with the server."""
    async with (
        listening(api.http._transport.app) as url,  # type: ignore[attr-defined]
        in_terminal("chat", "--url", url, "--max-tokens", "30") as terminal,
    ):
        yield terminal


async def test_ctrl_c_stops_the_answer_and_not_the_program(api: HttpApi, terminal: Terminal) -> None:
    before = terminal.mode
    await terminal.shows("> ")
    terminal.type("hi\n")
    await terminal.shows("hel")
    terminal.type(CTRL_C)
    await terminal.shows("Ctrl-C again ends")
    await asyncio.wait_for(api.engine.freed.get(), 10)  # the server stopped as well

    api.engine.hold_after = None
    await terminal.shows("> ")
    terminal.type("again\n")
    await terminal.shows("hello the world")

    await terminal.shows("> ")
    terminal.type(CTRL_C)
    await terminal.shows("Ctrl-C again ends")
    terminal.type(CTRL_C)
    assert await terminal.ends() == SIGNALLED
    assert terminal.mode == before


async def test_ctrl_c_twice_in_an_answer_ends_the_program(api: HttpApi, terminal: Terminal) -> None:
    await terminal.shows("> ")
    terminal.type("hi\n")
    await terminal.shows("hel")
    terminal.type(CTRL_C)
    await terminal.shows("Ctrl-C again ends")
    terminal.type(CTRL_C)
    assert await terminal.ends() == SIGNALLED
    await asyncio.wait_for(api.engine.freed.get(), 10)
