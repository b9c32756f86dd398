"""What each error means to a client and what the client should do, and errors without what is internal."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.errors import (
    Aborted,
    ConfigurationError,
    DeadlineExceeded,
    DrafterUnavailable,
    InvalidRequest,
    KvPoolExhausted,
    ModelChanged,
    ModelLoadError,
    NotReady,
    Overloaded,
    PermissionDenied,
    PilotfishError,
    RateLimited,
    TargetUnavailable,
    TooLarge,
    Unauthenticated,
    UnknownModel,
    UnsupportedParameter,
    WorkerUnavailable,
)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """An error, for clients."""

    kind: type[PilotfishError]
    meaning: str
    advice: str
    public_message: str | None = None
    """The message that clients get in place of the error's own, which names internals; `None`: its own."""


_RETRY = "Send the request again after a second or more, each time after twice as long."
_OPERATOR = "Tell the operator of the server; its log has the cause."
_BUSY = "the server cannot answer now; try again"

CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        InvalidRequest,
        "A value is malformed or out of bounds. The message names the field, the value and the bound.",
        "Change the request. The same request fails again.",
    ),
    CatalogueEntry(
        UnsupportedParameter,
        "The API has this parameter, and this server does not serve it. COMPATIBILITY.md lists what is served.",
        "Leave the parameter out.",
    ),
    CatalogueEntry(TooLarge, "The body or message exceeds `limits.max_body_bytes`.", "Send less at a time."),
    CatalogueEntry(
        UnknownModel, "No model with this name is served.", "Use a name that `GET /v1/models` or ListModels returns."
    ),
    CatalogueEntry(
        Unauthenticated,
        "The call has no API key, or one that is not valid.",
        "Send `Authorization: Bearer KEY` with a key that the operator gave you.",
    ),
    CatalogueEntry(
        PermissionDenied, "The API key is valid and does not open this.", "Use the key of an operator, or another call."
    ),
    CatalogueEntry(
        Overloaded,
        "The queue is full. The request has not begun.",
        "Wait for the seconds in `retry-after`, then send it again.",
    ),
    CatalogueEntry(
        RateLimited,
        "The client of this API key has used its requests or tokens a minute, or has too many answers at a time.",
        "Wait for the seconds in `retry-after`, then send it again; ask the operator for higher limits.",
    ),
    CatalogueEntry(NotReady, "The server starts, stops, or has lost its target.", _RETRY, _BUSY),
    CatalogueEntry(WorkerUnavailable, "A process of the cluster failed while it answered.", _RETRY, _BUSY),
    CatalogueEntry(TargetUnavailable, "The target was lost too often while it answered.", _RETRY, _BUSY),
    CatalogueEntry(DrafterUnavailable, "A drafter was lost. Answers go on without drafts.", _RETRY, _BUSY),
    CatalogueEntry(KvPoolExhausted, "The target's KV memory is full.", _RETRY, _BUSY),
    CatalogueEntry(
        DeadlineExceeded,
        "The deadline passed before the answer was complete. Tokens that were sent are valid.",
        "Allow more time (`x-request-timeout`, or the deadline of the gRPC call), or fewer tokens.",
    ),
    CatalogueEntry(Aborted, "The client left, or the request was aborted.", "Nothing, if it was meant."),
    CatalogueEntry(
        ModelChanged,
        "The answer began with a model or settings that are no longer served.",
        "Send the request again from the start.",
    ),
    CatalogueEntry(ConfigurationError, "The server's settings cannot be served.", _OPERATOR, _BUSY),
    CatalogueEntry(ModelLoadError, "The server's model cannot be loaded.", _OPERATOR, _BUSY),
)


def public_message(error: PilotfishError) -> str:
    """Return what clients may read of an error: its message, unless that may name processes, addresses or files."""
    for kind in type(error).__mro__:
        for entry in CATALOGUE:
            if entry.kind is kind:
                return str(error) if entry.public_message is None else entry.public_message
    return _BUSY


def without_internals(error: PilotfishError) -> PilotfishError:
    """Return the error itself, or one of its kind with the message for clients."""
    message = public_message(error)
    return error if message == str(error) else type(error)(message)
