"""Errors over gRPC. An error of the server is raised again at the client, with the same message."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from cluster.core.errors import (
    ERROR_CLASSES,
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PilotfishError,
    TooLarge,
    WorkerUnavailable,
)

Metadata = tuple[tuple[str, str | bytes], ...]

DETAIL_KEY = "pilotfish-error-bin"
"""Key of the trailing metadata that holds the class and the fields of an error, as JSON."""
STATUS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that holds a `google.rpc.Status`, where gRPC's libraries look for it."""
DOMAIN = "pilotfish"
"""The domain of `google.rpc.ErrorInfo`."""
# gRPC drops trailing metadata over 8 KiB. With these bounds it stays below, also when every byte is escaped.
_MESSAGE_BYTES = 1024
_FIELD_BYTES = 128
_BOUND_BYTES = 256
_RICH_MESSAGE_BYTES = 512
_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")

_BY_NAME = {kind.__name__: kind for kind in ERROR_CLASSES}


def to_status(error: PilotfishError, code: grpc.StatusCode | None = None) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return the status, its message, and the trailing metadata from which `from_rpc_error` rebuilds the error.

    `code` replaces the status that belongs to the error.
    """
    if code is None:
        code = grpc.StatusCode[error.grpc_status]
    detail: dict[str, Any] = {"kind": type(error).__name__}
    metadata: list[tuple[str, str | bytes]] = []
    if isinstance(error, InvalidRequest):
        detail |= {"field": _cut(error.field, _FIELD_BYTES), "bound": _cut(error.bound, _BOUND_BYTES)}
    if isinstance(error, Overloaded):
        detail["retry_after_seconds"] = error.retry_after_seconds
    if error.retry_after_seconds is not None:
        metadata.append(("retry-after", str(max(1, round(error.retry_after_seconds)))))
    metadata.append((DETAIL_KEY, json.dumps(detail).encode()))
    metadata.append((STATUS_KEY, _rich_status(code, error).SerializeToString()))
    return code, _cut(str(error), _MESSAGE_BYTES), tuple(metadata)


def _rich_status(code: grpc.StatusCode, error: PilotfishError) -> status_pb2.Status:
    """Return the error in the form of `google.rpc`: its name, the wrong field, and when to try again."""
    status = status_pb2.Status(code=code.value[0], message=_cut(str(error), _RICH_MESSAGE_BYTES))
    name = _WORD_START.sub("_", type(error).__name__).upper()
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=name, domain=DOMAIN)]
    if isinstance(error, InvalidRequest):
        field, bound = _cut(error.field, _FIELD_BYTES), _cut(error.bound, _BOUND_BYTES)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=f"must be {bound}", reason=name
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(max(0, round(error.retry_after_seconds * 1000)))
        details.append(retry)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def from_rpc_error(
    error: grpc.aio.AioRpcError, unavailable: type[PilotfishError] = WorkerUnavailable
) -> PilotfishError:
    """Return the error that the server raised, or `unavailable` for an error of the connection.

    `unavailable` also replaces an error of one of its base classes, because the caller knows what has failed.
    """
    message = error.details() or error.code().name
    rebuilt = _rebuild(error, message, unavailable)
    if rebuilt is not None:
        return rebuilt
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return _with_message(InvalidRequest("request", "", "valid"), message)
        case grpc.StatusCode.UNAUTHENTICATED:
            return unavailable("the server refused the call: it demands another cluster token")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        case grpc.StatusCode.CANCELLED:
            return Aborted(message)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _with_message(TooLarge("body", "", "smaller"), message)
        case _:
            return unavailable(message)


def _rebuild(error: grpc.aio.AioRpcError, message: str, unavailable: type[PilotfishError]) -> PilotfishError | None:
    """Rebuild an error from the trailing metadata, which may be malformed."""
    for key, value in error.trailing_metadata() or ():
        if key != DETAIL_KEY:
            continue
        try:
            detail = json.loads(value)
            kind = _BY_NAME[detail["kind"]]
            if issubclass(kind, InvalidRequest):
                return _with_message(kind(str(detail["field"]), "", str(detail["bound"])), message)
            if issubclass(kind, Overloaded):
                return kind(message, float(detail["retry_after_seconds"]))
            return unavailable(message) if issubclass(unavailable, kind) else kind(message)
        except (ValueError, KeyError, TypeError):
            return None
    return None


def _cut(text: str, most: int) -> str:
    """Return the first `most` bytes of `text` as valid UTF-8."""
    return text.encode(errors="backslashreplace")[:most].decode(errors="ignore")


def _with_message(error: PilotfishError, message: str) -> PilotfishError:
    """Return `error` with the server's message."""
    error.args = (message,)
    return error
