"""The page of errors, and errors that tell clients nothing of the inside of the cluster."""

from __future__ import annotations

import json

import grpc
import pytest

from cluster.core.errors import ERROR_CLASSES, InvalidRequest, NotReady, Overloaded, PilotfishError, TargetUnavailable
from cluster.ingress.openai.errors import error_response
from cluster.wire.status import to_status

INTERNAL = "ipv4:10.0.0.7:50051: /srv/models/secret"


@pytest.mark.parametrize("kind", ERROR_CLASSES)
def test_every_error_says_what_it_means_and_what_to_do(kind: type[PilotfishError]) -> None:
    assert kind.meaning.endswith(".")
    assert kind.advice.endswith(".")
    assert kind.grpc_status in grpc.StatusCode.__members__


@pytest.mark.parametrize("kind", [kind for kind in ERROR_CLASSES if not issubclass(kind, InvalidRequest)])
def test_no_error_inside_the_cluster_reaches_a_client(kind: type[PilotfishError]) -> None:
    error = kind(INTERNAL).without_internals()
    assert type(error) is kind
    hidden = error_response(kind(INTERNAL)).status >= 500 and error_response(kind(INTERNAL)).status != 504
    for text in (str(error), error_response(kind(INTERNAL)).body().decode(), to_status(error)[1]):
        assert ("10.0.0.7" in text or "/srv" in text) is not hidden


def test_what_helps_a_client_is_kept() -> None:
    invalid = InvalidRequest("n", 0, "at least 1")
    assert invalid.without_internals() is invalid
    busy = Overloaded("the queue of 256 sequences is full", 3.0)
    assert busy.without_internals() is busy
    assert json.loads(error_response(NotReady(INTERNAL)).body())["error"]["code"] == "service_unavailable"
    assert error_response(TargetUnavailable(INTERNAL)).status == 503
