"""All errors that Pilotfish raises on purpose.

    PilotfishError
    ├── InvalidRequest            a value of the client is out of bounds
    │   ├── UnsupportedParameter  this server does not support a parameter of the API
    │   ├── ContextLengthExceeded the prompt or the answer is longer than the model's context
    │   ├── TooLarge              a body or message exceeds its byte bound
    │   └── UnknownModel          the model is not served
    ├── Unauthenticated           the caller presents no valid API key
    ├── PermissionDenied          the caller's API key does not allow the call
    ├── Overloaded                the queue is full; retry after `retry_after_seconds`
    │   └── RateLimited           the client has used what it may
    ├── NotReady                  the server starts, drains or has no target
    ├── WorkerUnavailable         a worker cannot be reached
    │   ├── TargetUnavailable     sequences wait and are sent again later
    │   └── DrafterUnavailable    rows are verified without drafts
    ├── KvPoolExhausted           no block is free; the row is scheduled again
    ├── DeadlineExceeded          the deadline passed before the answer was complete
    ├── Aborted                   the client disconnected or aborted the request
    ├── ModelChanged              the stream began with a model or settings that are no longer served
    ├── ConfigurationError        the settings cannot be served
    └── ModelLoadError            the weights are missing, unsafe or do not fit the settings

A class carries its statuses over gRPC and HTTP, its name for clients, its meaning and its advice; a subclass that says
nothing else has those of its base. `cluster.wire.status` sends errors over gRPC and reads them back, and
`cluster.ingress.openai.errors` makes HTTP responses of them. The page of errors is generated from the classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

_MAX_SHOWN_CHARS = 80
_BUSY = "the server cannot answer now; try again"
_RETRY = "Send the request again after a second or more, each time after twice as long."
_OPERATOR = "Tell the operator of the server; its log has the cause."


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

    grpc_status: ClassVar[str] = "UNKNOWN"
    """Name of the status in `grpc.StatusCode`."""
    http_status: ClassVar[int] = 500
    http_type: ClassVar[str] = "server_error"
    """`error.type` in the body of an HTTP response."""
    http_code: ClassVar[str | None] = "internal_error"
    """`error.code` in the body of an HTTP response."""
    meaning: ClassVar[str] = ""
    """What the error means to a client."""
    advice: ClassVar[str] = _OPERATOR
    """What the client should do."""
    is_public: ClassVar[bool] = False
    """Whether clients may read the message. The message of any other error may name processes, addresses or files."""
    retry_after_seconds: float | None = None
    """After how many seconds the same request may succeed; `None` if waiting does not help."""

    @property
    def public_message(self) -> str:
        """What clients may read of this error."""
        return str(self) if self.is_public else _BUSY

    def without_internals(self) -> PilotfishError:
        """Return this error, or one of its class with the message for clients."""
        return self if self.public_message == str(self) else type(self)(self.public_message)


class InvalidRequest(PilotfishError):
    """A value that the client sent is out of bounds.

    `field` is the path of the value (`sampling.temperature`), `value` is what was sent, and `bound` describes the
    accepted values.
    """

    grpc_status = "INVALID_ARGUMENT"
    http_status = 400
    http_type = "invalid_request_error"
    http_code: ClassVar[str | None] = None
    meaning = "A value is malformed or out of bounds. The message names the field, the value and the bound."
    advice = "Change the request. The same request fails again."
    is_public = True

    def __init__(self, field: str, value: object, bound: str) -> None:
        self.field = field
        self.value = value
        self.bound = bound
        super().__init__(f"{field}: {shorten(value)} is refused; it must be {bound}")

    def renamed(self, field: str) -> Self:
        """Return the same error with the name that the field has in the client's API."""
        error = type(self)(field, self.value, self.bound)
        text = str(self)
        error.args = (field + text.removeprefix(self.field) if text.startswith(f"{self.field}:") else text,)
        return error


class UnsupportedParameter(InvalidRequest):
    """A parameter that the API has and this server does not support."""

    http_code = "unsupported_parameter"
    meaning = "The API has this parameter, and this server does not serve it."
    advice = "Leave the parameter out. The page of parameters lists what is served."

    def __init__(self, field: str, value: object, bound: str = "left out: it is not supported") -> None:
        super().__init__(field, value, bound)


class ContextLengthExceeded(InvalidRequest):
    """A prompt, or the answer that the client asks for, is longer than the model's context.

    Programs that shorten a conversation and send it again look for the code, or for "prompt is too long" and "maximum
    context length" in the message.
    """

    http_code = "context_length_exceeded"
    meaning = "The prompt, or `max_tokens`, exceeds the context of the model. The message has both numbers."
    advice = "Shorten the prompt, or ask for fewer tokens."

    @classmethod
    def of_prompt(cls, field: str, tokens: int, most: int, reason: str, *, is_least: bool = False) -> Self:
        """Return the error for a prompt of `tokens` tokens where at most `most` are served.

        With `is_least`, the prompt has `tokens` tokens or more: it is too long to count them.
        """
        count = f"at least {tokens}" if is_least else str(tokens)
        error = cls(field, f"{count} tokens", f"at most {most} tokens")
        error.args = (f"prompt is too long: {count} tokens > {most} maximum: {reason}",)
        return error

    @classmethod
    def of_answer(cls, field: str, tokens: int, context: int) -> Self:
        """Return the error for an answer of `tokens` tokens, which a context of `context` tokens cannot hold."""
        error = cls(field, tokens, f"at most {context} tokens")
        reason = context_reason(context)
        error.args = (f"{field}: the answer is too long: {tokens} tokens > {context} maximum: {reason}",)
        return error


def context_reason(context: int) -> str:
    """Return why a prompt or an answer is too long for a context of `context` tokens."""
    return f"this model's maximum context length is {context} tokens, for the prompt and the answer together"


class TooLarge(InvalidRequest):
    """A body or message exceeds its byte bound. It is refused before it is read."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413
    http_code = "request_too_large"
    meaning = "The body or message exceeds `limits.max_body_bytes`."
    advice = "Send less at a time."


class UnknownModel(InvalidRequest):
    """The request names a model that is not served."""

    grpc_status = "NOT_FOUND"
    http_status = 404
    http_code = "model_not_found"
    meaning = "No model with this name is served."
    advice = "Use a name that `GET /v1/models` or ListModels returns."


class Unauthenticated(PilotfishError):
    """The caller presents no API key, or one that is not valid. The message never contains what was presented."""

    grpc_status = "UNAUTHENTICATED"
    http_status = 401
    http_type = "invalid_request_error"
    http_code = "invalid_api_key"
    meaning = "The call has no API key, or one that is not valid."
    advice = "Send `Authorization: Bearer KEY` with a key that the operator gave you."
    is_public = True


class PermissionDenied(PilotfishError):
    """The caller's API key does not allow the call, or a browser calls for a page or a host that is not allowed."""

    grpc_status = "PERMISSION_DENIED"
    http_status = 403
    http_type = "invalid_request_error"
    http_code = "permission_denied"
    meaning = "The API key is valid and does not open this, or a browser calls for a foreign page or a foreign host."
    advice = (
        "Use the key of an operator, or another call. `server.cors_origins` allows pages, `server.allowed_hosts` hosts."
    )
    is_public = True


class Overloaded(PilotfishError):
    """The bounded queue is full."""

    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    http_type = "rate_limit_error"
    http_code = "rate_limit_exceeded"
    meaning = "The queue is full. The request has not begun."
    advice = "Wait for the seconds in `retry-after`, then send it again."
    is_public = True
    retry_after_seconds: float

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class RateLimited(Overloaded):
    """The client has used what it may: requests or tokens a minute, or answers at a time."""

    meaning = "The client of this API key has used its requests or tokens a minute, or has too many answers at a time."
    advice = "Wait for the seconds in `retry-after`, then send it again; ask the operator for higher limits."


class NotReady(PilotfishError):
    """The server starts, drains, or has no target."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    http_code = "service_unavailable"
    retry_after_seconds = 1.0
    meaning = "The server starts, stops, or has lost its target."
    advice = _RETRY


class WorkerUnavailable(PilotfishError):
    """A worker cannot be reached, or it failed."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    http_code = "service_unavailable"
    retry_after_seconds = 1.0
    meaning = "A process of the cluster failed while it answered."
    advice = _RETRY


class TargetUnavailable(WorkerUnavailable):
    """The target cannot verify. Sequences wait, and are sent again when the target is reachable."""

    meaning = "The target was lost too often while it answered."


class DrafterUnavailable(WorkerUnavailable):
    """The drafter cannot propose. Rows are verified with an empty tree."""

    meaning = "A drafter was lost. Answers go on without drafts."

    def __init__(self, message: str, *, had_call: bool = False) -> None:
        """`had_call` says that the drafter was lost while it had the call: it may have died of a row in it."""
        super().__init__(message)
        self.had_call = had_call


class KvPoolExhausted(PilotfishError):
    """The KV pool has too few free blocks."""

    grpc_status = "UNAVAILABLE"
    http_status = 503
    http_code = "service_unavailable"
    retry_after_seconds = 1.0
    meaning = "The target's KV memory is full."
    advice = _RETRY


class DeadlineExceeded(PilotfishError):
    """The deadline of the request passed before its answer was complete."""

    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504
    http_type = "timeout_error"
    http_code = "deadline_exceeded"
    meaning = "The deadline passed before the answer was complete. Tokens that were sent are valid."
    advice = "Allow more time (`x-request-timeout`, or the deadline of the gRPC call), or fewer tokens."
    is_public = True


class Aborted(PilotfishError):
    """The client disconnected or aborted the request."""

    grpc_status = "CANCELLED"
    http_status = 499
    http_type = "invalid_request_error"
    http_code = "aborted"
    meaning = "The client left, or the request was aborted."
    advice = "Nothing, if it was meant."
    is_public = True


class ModelChanged(PilotfishError):
    """The stream began with a model or settings that are no longer served, so it cannot be continued."""

    grpc_status = "ABORTED"
    http_status = 409
    http_code = "model_changed"
    meaning = "The answer began with a model or settings that are no longer served."
    advice = "Send the request again from the start."
    is_public = True


class ConfigurationError(PilotfishError):
    """A configuration cannot be served. The message names the required value and the one found."""

    grpc_status = "FAILED_PRECONDITION"
    meaning = "The server's settings cannot be served."


class ModelLoadError(PilotfishError):
    """The weights are missing, unsafe, or do not fit the configuration."""

    grpc_status = "FAILED_PRECONDITION"
    meaning = "The server's model cannot be loaded."


def _with_subclasses(kind: type[PilotfishError]) -> Iterator[type[PilotfishError]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _with_subclasses(derived)


ERROR_CLASSES: tuple[type[PilotfishError], ...] = tuple(_with_subclasses(PilotfishError))[1:]
"""Every error that a client or a peer may meet. A base stands before its subclasses."""
