"""Logs every generation over the gRPC API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from cluster.ingress.observability.request_log import log_request
from cluster.ingress.observability.request_record import Fields, RequestRecord
from pilotfish.v1 import generation_pb2


@contextmanager
def logged(request: generation_pb2.GenerateRequest) -> Iterator[RequestRecord]:
    """Yield the record of a call, and log one line at its end."""
    record = RequestRecord(time.monotonic)
    try:
        yield record
    except (asyncio.CancelledError, GeneratorExit):
        record.error = "Cancelled"
        raise
    except Exception as error:
        record.error = type(error).__name__
        raise
    finally:
        begin: Fields = {"request_id": record.answer_id or request.request_id, "api": "grpc", "method": "Generate"}
        log_request(begin | record.fields())
