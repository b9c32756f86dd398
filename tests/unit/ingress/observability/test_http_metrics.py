"""HTTP requests are counted by route, method and status, and refusals by their reason."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from cluster.core.errors import NotReady, Overloaded
from cluster.ingress.http import create_app
from cluster.ingress.observability.ingress_metrics import IngressMetrics
from tests.support.fakes.http_app import HI, LIMITS, HttpApi

CHAT = "/v1/chat/completions"


async def samples(api: HttpApi, name: str) -> dict[tuple[str, ...], float]:
    """The values of the series of that name, by the values of their labels in the order of the labels' names."""
    text = (await api.http.get("/metrics")).text
    families = text_string_to_metric_families(text)
    found = [one for family in families for one in family.samples if one.name == name]
    return {tuple(value for _, value in sorted(one.labels.items())): one.value for one in found}


async def test_requests_are_counted_by_route_method_and_class_of_status(api: HttpApi) -> None:
    await api.chat()
    await api.chat(stream=True)
    await api.chat(temperature="warm")
    await api.http.get("/v1/models/another/one")
    await api.http.get("/nowhere/secret-text")
    counts = await samples(api, "http_requests_total")
    assert counts[(CHAT, "POST", "2xx")] == 2
    assert counts[(CHAT, "POST", "4xx")] == 1
    assert counts[("/v1/models/{name:path}", "GET", "4xx")] == 1
    assert counts[("none", "GET", "4xx")] == 1
    durations = await samples(api, "http_request_duration_seconds_count")
    assert {key: durations[key] for key in counts} == counts


async def test_a_method_of_the_client_s_own_is_no_label(api: HttpApi) -> None:
    await api.http.request("SECRET", "/nowhere")
    assert ("none", "other", "4xx") in await samples(api, "http_requests_total")


async def test_refusals_are_counted_by_reason(api: HttpApi) -> None:
    await api.chat(temperature="warm")
    await api.http.get("/nowhere")
    for error in (Overloaded("full", 2.0), NotReady("starting")):
        api.engine.refusal = error
        await api.chat()
    counts = await samples(api, "pilotfish:refusals_total")
    reasons = ("InvalidRequest", "UnknownRoute", "Overloaded", "NotReady")
    assert counts == {("http", reason): 1.0 for reason in reasons}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [True, False])
async def test_a_cancelled_call_is_no_error_of_the_server_if_its_client_has_left(
    api: HttpApi, caplog: pytest.LogCaptureFixture, leaves: bool, stream: bool
) -> None:
    """Ray Serve cancels a call when it has told the application that the client left, and also when it stops."""
    caplog.set_level(logging.INFO, "pilotfish.requests")
    api.engine.hold_after = 1
    received, sent = asyncio.Queue[Message](), asyncio.Queue[Message]()
    received.put_nowait({"type": "http.request", "body": json.dumps({"messages": HI, "stream": stream}).encode()})
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": [(b"host", b"pilotfish")]}
    answering = asyncio.create_task(create_app(api.client, LIMITS)(scope, received.get, sent.put))
    await (sent.get() if stream else api.engine.arrived.get())
    if leaves:
        received.put_nowait({"type": "http.disconnect"})
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    status = 200 if stream else 499 if leaves else 500
    assert f" status={status} error={'Aborted' if leaves else 'CancelledError'} " in caplog.text


async def test_an_error_in_the_middle_of_a_stream_is_a_refusal_too(api: HttpApi) -> None:
    api.engine.failure = NotReady("lost")
    assert (await api.chat(stream=True)).status_code == 200
    assert await samples(api, "pilotfish:refusals_total") == {("http", "NotReady"): 1.0}


def test_the_series_of_a_replica_have_its_name() -> None:
    metrics = IngressMetrics("ingress-1")
    metrics.refused_over_grpc(NotReady("starting"))
    text = metrics.appended_to(b"answers_total 1\n").decode()
    assert text.startswith("answers_total 1\n")
    assert 'pilotfish:refusals_total{replica="ingress-1",api="grpc",reason="NotReady"} 1.0' in text
