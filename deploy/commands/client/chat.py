"""`pilotfish chat`: a conversation in the terminal over the HTTP API."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from cluster.core.errors import PilotfishError
from deploy.commands.client.connection import ChosenServer, InProcessOption, client_settings, connected, post, stream
from deploy.commands.client.conversation import HELP, Conversation
from deploy.commands.client.marked_text import ReceivedAnswer, statistics, write_parts
from deploy.commands.options import ConfigOption, SetOption
from deploy.network.https_client import CacertOption, UrlOption, check_reachable
from deploy.signals import SIGNALLED
from deploy.terminal import notify, output

_PATH = "/v1/chat/completions"
ReadLine = Callable[[], str]


def chat(
    config: ConfigOption = None,
    assignments: SetOption = None,
    url: UrlOption = None,
    in_process: InProcessOption = False,
    cacert: CacertOption = None,
    model: Annotated[str | None, typer.Option(help="A served name of the model.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of each answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 0.7,
    seed: Annotated[int | None, typer.Option(help="64-bit. If unset, the server draws one for each answer.")] = None,
    speculation: Annotated[bool, typer.Option(help="Whether drafts are verified. The text is the same.")] = True,
) -> None:
    """Talk with the model. Drafted tokens are green; /help lists what can be typed.

    Ctrl-C stops an answer. Ctrl-D, or Ctrl-C twice, ends the conversation.
    """
    settings = client_settings(config, assignments or (), url, in_process)
    conversation = Conversation(
        model=model, max_tokens=max_tokens, temperature=temperature, seed=seed, speculation=speculation
    )
    if system:
        conversation.begin(system)

    async def run() -> None:
        async with connected(ChosenServer(settings, url, in_process, cacert), notify) as client:
            await check_reachable(client)
            notify(f"connected to {client.base_url}. {HELP.splitlines()[0]}")
            talking = asyncio.ensure_future(talk(client, conversation, _prompting(), output, notify, interrupts))
            interrupts.conversation = talking
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupts.interrupt)
            await talking

    interrupts = Interrupts(notify)
    mode = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        # A thread may still wait for a line: it holds stdin, which Python would close, and has changed the terminal.
        if mode is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, mode)
        sys.stdout.flush()
        os._exit(SIGNALLED)


class Interrupts:
    """What Ctrl-C does in a conversation: it stops the answer; again, before another line is typed, it ends."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._count = 0
        self._answer: asyncio.Task[None] | None = None
        self.conversation: asyncio.Future[None] | None = None
        """What the second Ctrl-C ends."""

    def interrupt(self) -> None:
        """Stop the answer, or at the second time the conversation."""
        self._count += 1
        if self._count > 1 and self.conversation is not None:
            self.conversation.cancel()
            return
        if self._answer is not None:
            self._answer.cancel()
        self._notice("\nCtrl-C again ends")

    async def stoppable(self, answering: Coroutine[Any, Any, None]) -> None:
        """Await an answer that Ctrl-C stops."""
        self._count = 0
        self._answer = asyncio.create_task(answering)
        try:
            await self._answer
        except asyncio.CancelledError:
            if self._count != 1:
                self._answer.cancel()
                raise
        finally:
            self._answer = None


async def talk(
    client: httpx.AsyncClient,
    conversation: Conversation,
    read_line: ReadLine,
    console: Console,
    notice: Callable[[str], None],
    interrupts: Interrupts | None = None,
) -> None:
    """Answer each line until the reader is at its end. Errors of one request do not end the conversation."""
    interrupts = interrupts or Interrupts(notice)
    while not conversation.has_ended:
        try:
            line = (await _next_line(read_line)).strip()
        except EOFError:
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                notice(await _command(client, conversation, line))
            else:
                await interrupts.stoppable(_answer(client, conversation, line, console, notice))
        except PilotfishError as error:
            notice(str(error))


async def _command(client: httpx.AsyncClient, conversation: Conversation, line: str) -> str:
    """Carry out a command. Returns what to say about it."""
    if line not in ("/verify", "/receipt"):
        return conversation.command(line)
    bundle = conversation.bundle
    if bundle is None:
        return "there is no answer yet"
    if line == "/receipt":
        return json.dumps(bundle["receipt"])
    found = await post(client, "/v1/verify", bundle)
    if found["equal"]:
        return f"equal: the model writes exactly these {found['compared_tokens']} tokens"
    return f"the first difference: {json.dumps(found['first_difference'])}"


async def _answer(
    client: httpx.AsyncClient,
    conversation: Conversation,
    line: str,
    console: Console,
    notice: Callable[[str], None],
) -> None:
    body, received, begun = conversation.ask(line), ReceivedAnswer(), time.perf_counter()
    shown: dict[str, Any] = {**body, "stream": True, "return_drafts": True}
    try:
        async with aclosing(stream(client, _PATH, shown)) as chunks:
            async for chunk in chunks:
                received.add(chunk)
                write_parts(console, received)
    except asyncio.CancelledError:
        conversation.answered(body, received.text, None)  # as far as it was read
        raise
    finally:
        console.print()
    conversation.answered(body, received.text, received.receipt)
    if received.receipt is not None:
        notice(statistics(received.receipt, received.tokens, time.perf_counter() - begun))


async def _next_line(read_line: ReadLine) -> str:
    """Read a line in a thread that the event loop does not wait for when it ends."""
    read: Future[str] = Future()
    read.set_running_or_notify_cancel()  # so that its result can be set when nobody waits for it any more

    def run() -> None:
        try:
            read.set_result(read_line())
        except BaseException as error:
            read.set_exception(error)

    threading.Thread(target=run, name="read-line", daemon=True).start()
    return await asyncio.wrap_future(read)


def _prompting() -> ReadLine:
    """Return a reader of lines with editing and history, where the terminal has them."""
    with suppress(ImportError):  # not on every platform
        import readline  # noqa: F401 - `input` uses it
    return lambda: input("> ")
