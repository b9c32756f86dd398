"""A client of Pilotfish's gRPC API, synchronous and asynchronous."""

from __future__ import annotations

from pilotfish_client.access import Tls
from pilotfish_client.async_client import AsyncClient
from pilotfish_client.client import Client
from pilotfish_client.errors import (
    Aborted,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelChanged,
    Overloaded,
    PermissionDenied,
    PilotfishClientError,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from pilotfish_client.events import (
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Started,
    TokenLogprob,
    Usage,
)
from pilotfish_client.requests import Message, Parameters, Prompt

__all__ = [
    "Aborted",
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "InvalidRequest",
    "Message",
    "ContextLengthExceeded",
    "ModelChanged",
    "Overloaded",
    "Parameters",
    "PermissionDenied",
    "PilotfishClientError",
    "Prompt",
    "Started",
    "Tls",
    "TokenLogprob",
    "Unauthenticated",
    "Unavailable",
    "UnknownModel",
    "Usage",
]
