"""Errors that travel over gRPC."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from cluster.core.errors import (
    DrafterUnavailable,
    InvalidRequest,
    NotReady,
    Overloaded,
    PilotfishError,
    TargetUnavailable,
    UnsupportedParameter,
    WorkerUnavailable,
)
from cluster.wire.interceptor import status_of
from cluster.wire.status import STATUS_KEY, from_rpc_error, to_status


def arriving(error: PilotfishError, code: grpc.StatusCode | None = None) -> grpc.aio.AioRpcError:
    sent, message, metadata = to_status(error)
    return grpc.aio.AioRpcError(code or sent, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), message)


@pytest.mark.parametrize("unavailable", [TargetUnavailable, DrafterUnavailable])
def test_an_unexpected_failure_of_a_worker_is_that_workers_own_error(unavailable: type[PilotfishError]) -> None:
    unexpected = arriving(WorkerUnavailable("the server failed"), grpc.StatusCode.INTERNAL)
    error = from_rpc_error(unexpected, unavailable)
    assert type(error) is unavailable
    assert str(error) == "the server failed"


@pytest.mark.parametrize(
    "raised", [TargetUnavailable("lost"), NotReady("starting"), InvalidRequest("n", 0, "1 or more")]
)
def test_an_error_of_another_kind_arrives_as_it_was_raised(raised: PilotfishError) -> None:
    error = from_rpc_error(arriving(raised), DrafterUnavailable)
    assert type(error) is type(raised)
    assert str(error) == str(raised)


def test_a_worker_that_failed_is_not_taken_for_one_that_is_not_ready() -> None:
    assert type(from_rpc_error(arriving(WorkerUnavailable("failed")), NotReady)) is WorkerUnavailable


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
def test_an_error_without_detail_is_one_of_the_connection(code: grpc.StatusCode) -> None:
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")
    assert type(from_rpc_error(bare, TargetUnavailable)) is TargetUnavailable


def rich(error: PilotfishError) -> tuple[status_pb2.Status, dict[str, Any]]:
    """The `google.rpc.Status` of an error, and its details by the names of their messages."""
    code, _, metadata = to_status(error)
    status = status_pb2.Status.FromString(bytes(dict(metadata)[STATUS_KEY]))
    assert status.code == code.value[0]
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    found: dict[str, Any] = {}
    for detail in status.details:
        for kind in kinds:
            if detail.Is(kind.DESCRIPTOR):
                detail.Unpack(found.setdefault(kind.__name__, kind()))
    assert len(found) == len(status.details)
    return status, found


def test_a_wrong_value_names_its_field_as_google_rpc_does() -> None:
    status, details = rich(UnsupportedParameter("sampling.top_k", -1, "at least 0"))
    assert status.message == "sampling.top_k: -1 is refused; it must be at least 0"
    assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == ("UNSUPPORTED_PARAMETER", "pilotfish")
    (violation,) = details["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("sampling.top_k", "must be at least 0")


def test_an_overloaded_server_says_when_to_try_again_as_google_rpc_does() -> None:
    _, details = rich(Overloaded("full", 2.5))
    assert details["ErrorInfo"].reason == "OVERLOADED"
    assert details["RetryInfo"].retry_delay.ToMilliseconds() == 2500


def test_the_trailing_metadata_of_the_longest_error_stays_below_what_grpc_drops() -> None:
    _, message, metadata = to_status(InvalidRequest("ü" * 5000, "ü" * 5000, "ü" * 5000))
    size = 3 * len(message.encode()) + sum(len(key) + 4 * len(value) // 3 + 8 for key, value in metadata)
    assert size < 8 * 1024


def test_an_unexpected_error_has_the_same_code_in_both_forms() -> None:
    code, _, metadata = status_of(ValueError("a detail of the server"))
    status = status_pb2.Status.FromString(bytes(dict(metadata)[STATUS_KEY]))
    assert status.code == code.value[0] == grpc.StatusCode.INTERNAL.value[0]
    assert "a detail" not in status.message
