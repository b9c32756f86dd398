"""Errors in the format of OpenAI's API: status, `{"error": {message, type, param, code}}`, headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from cluster.core.errors import (
    Aborted,
    DeadlineExceeded,
    InvalidRequest,
    ModelChanged,
    NotReady,
    Overloaded,
    PermissionDenied,
    PilotfishError,
    TooLarge,
    Unauthenticated,
    UnknownModel,
    UnsupportedParameter,
    WorkerUnavailable,
)
from cluster.ingress.errors.catalogue import public_message

_INVALID = "invalid_request_error"
_SERVER = "server_error"

# The first matching class is used: error, status, type, code.
_TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (UnsupportedParameter, 400, _INVALID, "unsupported_parameter"),
    (TooLarge, 413, _INVALID, "request_too_large"),
    (UnknownModel, 404, _INVALID, "model_not_found"),
    (InvalidRequest, 400, _INVALID, None),
    (Unauthenticated, 401, _INVALID, "invalid_api_key"),
    (PermissionDenied, 403, _INVALID, "permission_denied"),
    (Overloaded, 429, "rate_limit_error", "rate_limit_exceeded"),
    (NotReady, 503, _SERVER, "service_unavailable"),
    (WorkerUnavailable, 503, _SERVER, "service_unavailable"),
    (DeadlineExceeded, 504, "timeout_error", "deadline_exceeded"),
    (Aborted, 499, _INVALID, "aborted"),
    (ModelChanged, 409, _SERVER, "model_changed"),
)


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An HTTP error response."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the JSON body, in ASCII so that a lone surrogate in the message can be sent."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def error_response(error: Exception) -> ErrorResponse:
    """Convert an error. The text of an unexpected error, or of one inside the cluster, is not sent to the client."""
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            message = public_message(error) if isinstance(error, PilotfishError) else str(error)
            return ErrorResponse(status, message, name, _param(error), code, _headers(error))
    if isinstance(error, PilotfishError):
        return ErrorResponse(500, public_message(error), _SERVER, code="internal_error")
    return ErrorResponse(500, "the server failed to answer; its log has the cause", _SERVER, code="internal_error")


def _param(error: Exception) -> str | None:
    if not isinstance(error, InvalidRequest) or error.field == "body":
        return None
    return error.field


def _headers(error: Exception) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds)))}
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    return {}
