"""Errors that travel over gRPC."""

from __future__ import annotations

import grpc
import pytest

from cluster.core.errors import (
    DrafterUnavailable,
    InvalidRequest,
    NotReady,
    PilotfishError,
    TargetUnavailable,
    WorkerUnavailable,
)
from cluster.wire.status import from_rpc_error, to_status


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
