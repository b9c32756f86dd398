"""All errors that Pilotfish raises on purpose.

    PilotfishError
    ├── InvalidRequest            a value of the client is out of bounds
    │   ├── UnsupportedParameter  this server does not support a parameter of the API
    │   ├── TooLarge              a body or message exceeds its byte bound
    │   └── UnknownModel          the model is not served
    ├── Unauthenticated           the caller presents no valid API key
    ├── PermissionDenied          the caller's API key does not allow the call
    ├── Overloaded                the queue is full; retry after `retry_after_seconds`
    │   └── RateLimited           the client has used what it may
    ├── NotReady                  the server starts, drains or has no target
    ├── DeadlineExceeded          the deadline passed before the answer was complete
    ├── Aborted                   the client disconnected or aborted the request
    ├── ModelChanged              the stream began with a model or settings that are no longer served
    ├── WorkerUnavailable         a worker cannot be reached
    │   ├── DrafterUnavailable    rows are verified without drafts
    │   └── TargetUnavailable     sequences wait and are sent again later
    ├── KvPoolExhausted           no block is free; the row is scheduled again
    ├── ConfigurationError        the settings cannot be served
    └── ModelLoadError            the weights are missing, unsafe or do not fit the settings

`cluster.wire.status` maps them to gRPC statuses and back, `cluster.ingress.openai.errors` to HTTP responses.
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
    """The base class of all errors that Pilotfish raises on purpose."""


class InvalidRequest(PilotfishError):
    """A value that the client sent is out of bounds.

    `field` is the path of the value (`sampling.temperature`), `value` is what was sent, and `bound` describes the
    accepted values.
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
    """A parameter that the API has and this server does not support."""

    def __init__(self, field: str, value: object, bound: str = "left out: it is not supported") -> None:
        super().__init__(field, value, bound)


class TooLarge(InvalidRequest):
    """A body or message exceeds its byte bound. It is refused before it is read."""


class UnknownModel(InvalidRequest):
    """The request names a model that is not served."""


class Unauthenticated(PilotfishError):
    """The caller presents no API key, or one that is not valid. The message never contains what was presented."""


class PermissionDenied(PilotfishError):
    """The caller's API key is valid and does not allow the call."""


class Overloaded(PilotfishError):
    """The bounded queue is full."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class RateLimited(Overloaded):
    """The client has used what it may: requests or tokens a minute, or answers at a time."""


class NotReady(PilotfishError):
    """The server starts, drains, or has no target."""


class DeadlineExceeded(PilotfishError):
    """The deadline of the request passed before its answer was complete."""


class Aborted(PilotfishError):
    """The client disconnected or aborted the request."""


class ModelChanged(PilotfishError):
    """The stream began with a model or settings that are no longer served, so nobody can continue it."""


class WorkerUnavailable(PilotfishError):
    """A worker cannot be reached, or it failed."""


class DrafterUnavailable(WorkerUnavailable):
    """The drafter cannot propose. Rows are verified with an empty tree."""


class TargetUnavailable(WorkerUnavailable):
    """The target cannot verify. Sequences wait, and are sent again when the target is reachable."""


class KvPoolExhausted(PilotfishError):
    """The KV pool has too few free blocks."""


class ConfigurationError(PilotfishError):
    """A configuration cannot be served. The message names the required value and the one found."""


class ModelLoadError(PilotfishError):
    """The weights are missing, unsafe, or do not fit the configuration."""
