"""How a command ends: the statuses of the process, and SIGTERM and Ctrl-C as an exception in the main thread."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType

from cluster.core.errors import ConfigurationError, InvalidRequest, PilotfishError

SIGNALLED = 130
"""Status of a command that a signal ended."""
_LOOK_SECONDS = 1.0


def status_of(error: PilotfishError) -> int:
    """The status of a command that an error ended: 2 if the settings or the request are refused, otherwise 1."""
    return 2 if isinstance(error, ConfigurationError | InvalidRequest) else 1


class Interrupted(BaseException):
    """The process received SIGTERM or SIGINT."""


def raise_on_signals() -> None:
    """Make SIGTERM and SIGINT raise `Interrupted` in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of signal handlers
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)


def wait_for_signal(find_loss: Callable[[], str | None]) -> str | None:
    """Return `None` at the first SIGTERM or SIGINT, or what `find_loss` finds lost. Call `raise_on_signals` first."""
    try:
        while (lost := find_loss()) is None:
            time.sleep(_LOOK_SECONDS)
    except Interrupted:
        return None
    return lost
