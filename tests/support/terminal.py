"""Commands of Pilotfish, in this process or in a terminal, where a test types and reads as a user does."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from deploy import cli

CTRL_C = "\x03"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal, and the command that runs in it."""

    def __init__(self, leader: int, follower: int, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._leader = leader
        self._follower = follower
        self._unread = ""
        self._output: asyncio.Queue[str] = asyncio.Queue()

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    async def shows(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """Wait until the terminal shows what matches, after all that was waited for before. Returns the match."""
        async with asyncio.timeout(seconds):
            while not (found := re.search(pattern, self._unread)):
                self._unread = _ESCAPES.sub("", self._unread + await self._output.get())
        self._unread = self._unread[found.end() :]
        return found

    async def ends(self, seconds: float = 20.0) -> int:
        """Wait until the command ends. Returns its status."""
        return await asyncio.wait_for(self.process.wait(), seconds)

    @property
    def mode(self) -> list[object]:
        """How the terminal treats what is typed: by lines, with an echo."""
        return termios.tcgetattr(self._follower)[:4]

    def read(self) -> None:
        """Note what the command has written. The event loop calls it."""
        self._output.put_nowait(os.read(self._leader, 1 << 16).decode(errors="replace"))


def _log_in(follower: int) -> None:
    """Give the process its terminal, and SIGINT, which a script's background processes ignore."""
    os.login_tty(follower)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@asynccontextmanager
async def in_terminal(*arguments: str) -> AsyncIterator[Terminal]:
    """`pilotfish` with arguments, in a terminal whose Ctrl-C it gets as SIGINT."""
    leader, follower = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "deploy.cli", *arguments),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=os.environ | {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"},
        preexec_fn=lambda: _log_in(follower),
    )
    terminal = Terminal(leader, follower, process)
    asyncio.get_running_loop().add_reader(leader, terminal.read)
    try:
        yield terminal
    finally:
        asyncio.get_running_loop().remove_reader(leader)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        os.close(leader)
        os.close(follower)


def run_command(*words: str) -> int:
    """Run `pilotfish` with these words in this process. Returns its exit code."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["pilotfish", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)
