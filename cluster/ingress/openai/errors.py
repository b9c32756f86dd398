"""Errors over HTTP: status, headers, and the body of the API that the path belongs to.

OpenAI's is `{"error": {message, type, param, code}}`, Anthropic's `{"type": "error", "error": {type, message}}`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Scope

from cluster.core.errors import InvalidRequest, PilotfishError, Unauthenticated

_ANTHROPICS = "/v1/messages/"
"""In the paths of Anthropic's API, with a slash behind. A proxy may serve them below a prefix."""
_ANTHROPICS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An HTTP error response."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, str | None]:
        """The fields of an error in OpenAI's API, also of the last event of a stream that fails."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

    def body(self, path: str = "") -> bytes:
        """Return the JSON body for a request to `path`, in ASCII because the message may have a lone surrogate."""
        if _ANTHROPICS in f"{path}/":
            return json.dumps(anthropics_error(self.status, self.message)).encode()
        return json.dumps({"error": self.fields}).encode()

    def response(self, scope: Scope) -> Response:
        """Return the response to a request."""
        return Response(self.body(scope["path"]), self.status, self.headers, "application/json")


def anthropics_error(status: int, message: str) -> dict[str, object]:
    """Return the body of an error in Anthropic's API, which is also the last event of a stream that fails."""
    kind = _ANTHROPICS_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


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
