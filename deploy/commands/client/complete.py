"""`pilotfish complete`: continue one text over the HTTP API."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from deploy.commands.client.connection import ChosenServer, InProcessOption, client_settings, connected, post, stream
from deploy.commands.client.marked_text import ReceivedAnswer, statistics, write_parts
from deploy.commands.options import ConfigOption, SetOption
from deploy.network.https_client import CacertOption, UrlOption
from deploy.terminal import notify, output

_PATH = "/v1/completions"


def complete(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from the standard input.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    url: UrlOption = None,
    in_process: InProcessOption = False,
    cacert: CacertOption = None,
    model: Annotated[str | None, typer.Option(help="A served name of the model.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="64-bit. If unset, the server draws one.")] = None,
    speculation: Annotated[bool, typer.Option(help="Whether drafts are verified. The text is the same.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole response as JSON.")] = False,
) -> None:
    """Continue a text without the chat template. `pilotfish chat` asks in a conversation."""
    settings = client_settings(config, assignments or (), url, in_process)
    body: dict[str, Any] = {
        "model": model,
        "prompt": sys.stdin.read() if prompt == "-" else prompt,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "speculation": {"enabled": speculation},
    }
    asyncio.run(answer(ChosenServer(settings, url, in_process, cacert), body, output, as_json=as_json))


async def answer(server: ChosenServer, body: dict[str, Any], console: Console, *, as_json: bool) -> None:
    """Write the answer to `console`: as it arrives, or with `as_json` the whole response. Raises `PilotfishError`."""
    async with connected(server, notify) as client:
        if as_json:
            console.print(json.dumps(await post(client, _PATH, body)), markup=False, soft_wrap=True)
            return
        begun, received = time.perf_counter(), ReceivedAnswer()
        async for chunk in stream(client, _PATH, {**body, "stream": True, "return_drafts": True}):
            received.add(chunk)
            write_parts(console, received)
        console.print()
        if received.receipt is not None:
            notify(statistics(received.receipt, received.tokens, time.perf_counter() - begun))
