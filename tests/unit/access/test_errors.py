"""The page of errors, and errors that tell clients nothing of the inside of the cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core.errors import InvalidRequest, NotReady, Overloaded, PilotfishError, TargetUnavailable
from cluster.ingress.endpoints.error_page import page
from cluster.ingress.errors.catalogue import CATALOGUE, without_internals
from cluster.ingress.openai.errors import error_response
from cluster.wire.status import to_status

PAGE = Path(__file__).resolve().parents[3] / "ERRORS.md"
INTERNAL = "ipv4:10.0.0.7:50051: /srv/models/secret"


def kinds(kind: type[PilotfishError] = PilotfishError) -> Iterator[type[PilotfishError]]:
    for one in kind.__subclasses__():
        if one.__module__.startswith(("cluster.", "workers.", "deploy.")):
            yield one
        yield from kinds(one)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make errors`"


def test_every_error_is_listed_once() -> None:
    listed = [entry.kind for entry in CATALOGUE]
    assert len(set(listed)) == len(listed)
    public = {one for one in kinds() if one.__module__ == "cluster.core.errors"}
    assert set(listed) == public


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.kind.__name__)
def test_no_error_inside_the_cluster_reaches_a_client(entry: object) -> None:
    kind = getattr(entry, "kind")  # noqa: B009 - the ids of parameters are untyped
    if issubclass(kind, InvalidRequest):
        return
    error = without_internals(kind(INTERNAL))
    assert type(error) is kind
    hidden = error_response(kind(INTERNAL)).status >= 500 and error_response(kind(INTERNAL)).status != 504
    for text in (str(error), error_response(kind(INTERNAL)).body().decode(), to_status(error)[1]):
        assert ("10.0.0.7" in text or "/srv" in text) is not hidden


def test_what_helps_a_client_is_kept() -> None:
    invalid = InvalidRequest("n", 0, "at least 1")
    assert without_internals(invalid) is invalid
    busy = Overloaded("the queue of 256 sequences is full", 3.0)
    assert without_internals(busy) is busy
    assert json.loads(error_response(NotReady(INTERNAL)).body())["error"]["code"] == "service_unavailable"
    assert error_response(TargetUnavailable(INTERNAL)).status == 503
