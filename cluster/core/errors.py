"""Every error Pilotfish raises on purpose, drawn as one tree.

    PilotfishError
    ├── InvalidRequest            the client can mend it: names the field, the value and the bound
    │   ├── UnsupportedParameter  known to the API, not served here
    │   ├── TooLarge              a body or message over its byte bound
    │   └── UnknownModel
    ├── Overloaded                the queue is full: try again after `retry_after_seconds`
    ├── NotReady                  starting, draining or without a target
    ├── DeadlineExceeded
    ├── Aborted                   the client left or asked to stop
    ├── WorkerUnavailable
    │   ├── DrafterUnavailable    costs speed, never an answer
    │   └── TargetUnavailable     the sequences are replayed when it is back
    ├── KvPoolExhausted           no free block: the row is put back, not lost
    ├── ConfigurationError        an operator can mend it
    └── ModelLoadError            the weights or their configuration do not fit

`cluster.wire.status` maps them to gRPC codes and back, `cluster.ingress.http` to HTTP ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

_MAX_SHOWN_CHARS = 80


def shorten(value: object) -> str:
    """Return `repr(value)`, cut to 80 characters. The work does not grow with the size or depth of JSON values."""
    text = ""
    for part in _repr_parts(value):
        text += part
        if len(text) > _MAX_SHOWN_CHARS:
            return text[: _MAX_SHOWN_CHARS - 1] + "…"
    return text


def _repr_parts(value: object) -> Iterator[str]:
    """Yield `repr(value)` in parts. Containers yield one part per entry, so a reader can stop early."""
    if isinstance(value, str | bytes):
        yield repr(value[:_MAX_SHOWN_CHARS])
    elif isinstance(value, list):
        yield "["
        for index, entry in enumerate(value):
            yield ", " if index else ""
            yield from _repr_parts(entry)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (key, entry) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _repr_parts(key)
            yield ": "
            yield from _repr_parts(entry)
        yield "}"
    else:
        yield repr(value)


class PilotfishError(Exception):
    """The root: what the project raises on purpose."""


class InvalidRequest(PilotfishError):
    """A value the client sent is outside its bound.

    `field` is the path of the offending value (`sampling.temperature`), `value` what was sent,
    `bound` what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, bound: str) -> None:
        self.field = field
        self.value = value
        self.bound = bound
        super().__init__(f"{field}: {shorten(value)} is refused; it must be {bound}")

    def renamed(self, field: str) -> Self:
        """Return the same error for a field that the client knows by another name."""
        error = type(self)(field, self.value, self.bound)
        error.args = (field + str(self).removeprefix(self.field),)
        return error


class UnsupportedParameter(InvalidRequest):
    """A parameter that the API knows and this server does not serve (yet)."""

    def __init__(self, field: str, value: object, bound: str = "left out: it is not supported") -> None:
        super().__init__(field, value, bound)


class TooLarge(InvalidRequest):
    """A body or message over its byte bound, refused before it is read."""


class UnknownModel(InvalidRequest):
    """The request names a model that is not served."""


class Overloaded(PilotfishError):
    """The bounded queue is full."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class NotReady(PilotfishError):
    """The server is starting, draining, or has no target."""


class DeadlineExceeded(PilotfishError):
    """The request's deadline passed before its answer was complete."""


class Aborted(PilotfishError):
    """The client left, or asked for the request to stop."""


class WorkerUnavailable(PilotfishError):
    """A worker cannot be reached or answered with a fault of its own."""


class DrafterUnavailable(WorkerUnavailable):
    """No drafts for now: rows go with an empty tree."""


class TargetUnavailable(WorkerUnavailable):
    """No verdicts for now: sequences wait and are replayed."""


class KvPoolExhausted(PilotfishError):
    """The KV pool has no free block for what was asked."""


class ConfigurationError(PilotfishError):
    """A configuration cannot be served; the message says what was needed and what was found."""


class ModelLoadError(PilotfishError):
    """Weights are missing, unsafe, or do not fit the configuration."""
