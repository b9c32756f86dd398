"""The errors that the clients raise."""

from __future__ import annotations

import json
from typing import Any

import grpc

_DETAIL_KEY = "pilotfish-error-bin"
"""Key of the trailing metadata that holds the class and the fields of the server's error, as JSON."""


class PilotfishClientError(Exception):
    """The base class of all errors that the clients raise."""


class InvalidRequest(PilotfishClientError):
    """A value of the request is out of bounds."""

    def __init__(self, message: str, field: str = "", bound: str = "") -> None:
        self.field = field
        """The name of the value, as `temperature`."""
        self.bound = bound
        """The accepted values."""
        super().__init__(message)


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the answer that the request asks for, is longer than the model's context."""


class UnknownModel(InvalidRequest):
    """The model is not served."""


class Unauthenticated(PilotfishClientError):
    """The server demands an API key, and the client presents none or another."""


class PermissionDenied(PilotfishClientError):
    """The API key does not allow the call."""


class Overloaded(PilotfishClientError):
    """The server's queue is full."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class Unavailable(PilotfishClientError):
    """No server can be reached, or none is ready."""


class DeadlineExceeded(PilotfishClientError):
    """The time of the call passed before the answer was complete."""


class Aborted(PilotfishClientError):
    """The call was cancelled."""


class ModelChanged(PilotfishClientError):
    """The stream broke off, and by now only other models or settings are served."""


_BY_CODE: dict[grpc.StatusCode, type[PilotfishClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.ABORTED: ModelChanged,
}


def from_rpc_error(error: Any) -> PilotfishClientError:
    """The error for a failed call: a `grpc.RpcError` of either API."""
    code, details, trailing = error.code(), error.details(), error.trailing_metadata()
    message = details or str(code)
    detail = _detail(trailing)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if detail.get("kind") == "Overloaded" or "retry_after_seconds" in detail:
            return Overloaded(message, _number(detail.get("retry_after_seconds")))
        return InvalidRequest(message, str(detail.get("field", "")), str(detail.get("bound", "")))
    kind = _BY_CODE.get(code, PilotfishClientError)
    if detail.get("kind") == "ContextLengthExceeded":
        kind = ContextLengthExceeded
    if issubclass(kind, InvalidRequest):
        return kind(message, str(detail.get("field", "")), str(detail.get("bound", "")))
    return kind(message)


def is_loss(error: PilotfishClientError, *, has_started: bool) -> bool:
    """Whether another attempt may succeed: the server or the connection was lost, or a stream finds it busy."""
    return isinstance(error, Unavailable | Aborted) or (has_started and isinstance(error, Overloaded))


def _detail(trailing: Any) -> dict[str, object]:
    """The server's description of its error; empty if there is none."""
    for key, value in tuple(trailing or ()):
        if key == _DETAIL_KEY:
            try:
                found = json.loads(value)
            except ValueError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0
