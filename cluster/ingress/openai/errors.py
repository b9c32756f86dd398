"""Errors in the format of OpenAI's API: status, `{"error": {message, type, param, code}}`, headers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from cluster.core.errors import InvalidRequest, PilotfishError, Unauthenticated


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
    if not isinstance(error, PilotfishError):
        message = "the server failed to answer; its log has the cause"
        return ErrorResponse(500, message, "server_error", code="internal_error")
    return ErrorResponse(
        error.http_status, error.public_message, error.http_type, _param(error), error.http_code, _headers(error)
    )


def _param(error: PilotfishError) -> str | None:
    if not isinstance(error, InvalidRequest) or error.field == "body":
        return None
    return error.field


def _headers(error: PilotfishError) -> dict[str, str]:
    if error.retry_after_seconds is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after_seconds)))}
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    return {}
