"""`pilotfish top`: the load and speed of every replica of a running cluster, live in the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.live import Live

from cluster.core.errors import PilotfishError
from deploy.commands.client.cluster_table import ReplicaStatus, TokensPerStep, statuses, tables
from deploy.commands.client.connection import get, server_client
from deploy.commands.options import ConfigOption, SetOption
from deploy.network.https_client import CacertOption, UrlOption
from deploy.settings import load_settings
from deploy.terminal import output

_PATH = "/cluster"


def top(
    config: ConfigOption = None,
    assignments: SetOption = None,
    url: UrlOption = None,
    cacert: CacertOption = None,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Time between two looks, in seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end. Rates are over one interval.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per look instead of a table.")] = False,
) -> None:
    """Show replicas, requests, tokens per second, acceptance, KV memory, and who drafts for whom in a running cluster.

    q ends it. Where API keys are demanded, `PILOTFISH_API_KEY` must be that of an operator.
    """
    settings = load_settings(config, assignments or (), is_client=True)

    async def run() -> None:
        async with server_client(settings, url, cacert) as client:
            if once or as_json:
                await print_statuses(client, interval, output, once=once, as_json=as_json)
            else:
                await watch(client, interval, output)

    asyncio.run(run())


async def print_statuses(
    client: httpx.AsyncClient, interval: float, console: Console, *, once: bool, as_json: bool
) -> None:
    """Print what each replica has done, look after look, or `once`. Raises `PilotfishError`."""
    before, since = await _look(client)
    while True:
        await asyncio.sleep(interval)
        after, now = await _look(client)
        found = statuses(before, after, now - since)
        if as_json:
            replicas = [status.values() for status in found]
            console.print(json.dumps({"replicas": replicas}), markup=False, soft_wrap=True)
        else:
            console.print(tables(found))
        if once:
            return
        before, since = after, now


async def watch(client: httpx.AsyncClient, interval: float, console: Console) -> None:
    """Show a table that changes in place until somebody types q or Ctrl-C. Raises the error of the first look."""
    before, since = await _look(client)
    shown = tables(statuses(before, before, interval))
    with quit_key() as quits, Live(shown, console=console, auto_refresh=False) as live:
        following = asyncio.create_task(_follow(client, interval, live, before, since))
        quitting = asyncio.create_task(quits.wait())
        try:
            await asyncio.wait({following, quitting}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            following.cancel()
            quitting.cancel()
            await asyncio.gather(following, quitting, return_exceptions=True)


async def _follow(
    client: httpx.AsyncClient, interval: float, live: Live, before: list[dict[str, Any]], since: float
) -> None:
    """Show the table look after look, for ever. `before` is what the server said at `since`."""
    found: list[ReplicaStatus] = statuses(before, before, interval)
    history = TokensPerStep()
    while True:
        await asyncio.sleep(interval)
        try:
            after, now = await _look(client)
        except PilotfishError as error:  # the server may come back
            live.update(tables(found, str(error), history), refresh=True)
            continue
        found = statuses(before, after, now - since)
        history.add(found)
        live.update(tables(found, history=history), refresh=True)
        before, since = after, now


@contextmanager
def quit_key() -> Iterator[asyncio.Event]:
    """Yield an event that is set when somebody types q. Keys count at once, where the standard input is a terminal."""
    pressed, loop = asyncio.Event(), asyncio.get_running_loop()
    if not sys.stdin.isatty():
        yield pressed
        return
    descriptor = sys.stdin.fileno()

    def read() -> None:
        if os.read(descriptor, 64).lower().startswith(b"q"):
            pressed.set()

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def _look(client: httpx.AsyncClient) -> tuple[list[dict[str, Any]], float]:
    """Return what the server says of its replicas, and when."""
    return (await get(client, _PATH))["replicas"], time.monotonic()
