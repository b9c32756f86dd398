"""The page that lists every error of both public APIs, generated from the code."""

from __future__ import annotations

import json
from collections.abc import Iterator

from cluster.core.errors import ERROR_CLASSES, InvalidRequest, PilotfishError
from cluster.ingress.openai.errors import error_response
from cluster.wire.status import to_status


def _fields(path: str) -> str:
    """The names of the fields of an error in the API of a path."""
    error = json.loads(error_response(InvalidRequest("field", "value", "bound")).body(path))["error"]
    return f"{{{', '.join(map(json.dumps, error))}}}"


_HEAD = f"""# Errors

Every error of the HTTP API and of the gRPC API. This page is generated from the code by `make pages`.

Over HTTP, the body is `{{"error": {_fields("/v1")}}}`; `param` names the field of the request. A
stream that has begun sends the same object as its last event, `/v1/responses` the same fields in its event `error`,
where `type` is `error`. `/v1/messages` and the paths below it answer in Anthropic's form,
`{{"type": "error", "error": {_fields("/v1/messages")}}}`. Over gRPC, the status has the code below, and the trailers
have its details: `grpc-status-details-bin` as a `google.rpc.Status`, `pilotfish-error-bin` with the error's name and
field as JSON. Both send `retry-after`, in seconds, where waiting helps. Messages of errors inside the cluster
say nothing of processes, addresses or files: the log of the ingress has them, with the id of the request.

| error | HTTP | `code` | gRPC | meaning | what to do |
|---|---|---|---|---|---|
"""
_CONNECTIONS = (
    (400, "invalid_http", "The bytes are no HTTP request.", "Check the client."),
    (404, "", "There is no such route.", "Check the path."),
    (405, "", "The route has no such method.", "Check the method."),
    (408, "request_timeout", "The headers or the body did not arrive in time.", "Send the request again, faster."),
    (431, "headers_too_large", "Request line and headers have too many bytes.", "Send fewer or shorter headers."),
    (500, "internal_error", "The server failed; over gRPC INTERNAL.", "Tell the operator of the server."),
)
_OTHERS = """
## Without an error of the table above

| HTTP | `code` | meaning | what to do |
|---|---|---|---|
"""


def page() -> str:
    """Return the page, in Markdown."""
    return "".join([_HEAD, *_errors(), _OTHERS, *_others()])


def _errors() -> Iterator[str]:
    for kind in ERROR_CLASSES:
        error = sample(kind)
        response, (code, _, _) = error_response(error), to_status(error)
        cells = (f"`{kind.__name__}`", response.status, _code(response.code), code.name)
        yield _row(*cells, kind.meaning, kind.advice)


def _others() -> Iterator[str]:
    for status, code, meaning, advice in _CONNECTIONS:
        yield _row(status, _code(code), meaning, advice)


def sample(kind: type[PilotfishError]) -> PilotfishError:
    """Return an error of the class."""
    if issubclass(kind, InvalidRequest):
        return kind("field", "value", "bound")
    return kind("message")


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |\n"


def _code(code: str | None) -> str:
    return f"`{code}`" if code else "—"
