"""One log line per request: ids, counts, times and reasons, and nothing that a client wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cluster.core.config.server import ClientLimitsSection
from cluster.core.errors import InvalidRequest, NotReady
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.access.public_client import PublicClient
from cluster.ingress.grpc import RoutedGenerationServicer
from cluster.ingress.http import create_app
from pilotfish.v1 import generation_pb2
from tests.support.fakes.fake_engine import Remaining
from tests.support.fakes.http_app import LIMITS, HttpApi
from workers.serve.logs import JsonFormatter

SECRET = "a-prompt-that-nobody-may-read"
KEY = "sk-" + "k" * 40


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The request lines as JSON."""
    records = [record for record in caplog.records if record.name == "pilotfish.requests"]
    formatted = [JsonFormatter("ingress").format(record) for record in records]
    for text in (*formatted, *(record.getMessage() for record in records)):
        assert SECRET not in text
        assert KEY not in text
    return [json.loads(text) for text in formatted]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "pilotfish.requests")
    return caplog


async def test_an_answer_is_one_line_with_what_its_client_sees(api: HttpApi, log: pytest.LogCaptureFixture) -> None:
    response = await api.http.post("/v1/completions", json={"prompt": "hi", "n": 2}, headers={"x-request-id": "mine"})
    (line,) = lines(log)
    body = response.json()
    assert response.headers["x-request-id"] == "mine" == line["request_id"]
    assert body["id"].endswith(line["answer_id"])
    assert (line["api"], line["method"], line["handler"], line["status"]) == ("http", "POST", "/v1/completions", 200)
    assert (line["message"], line["level"]) == ("request", "info")
    assert line["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert line["completion_tokens"] == body["usage"]["completion_tokens"]
    receipts = [choice["receipt"] for choice in body["choices"]]
    assert line["drafted_tokens"] == sum(receipt["drafted"] for receipt in receipts) > 0
    assert line["accepted_tokens"] == sum(receipt["accepted"] for receipt in receipts) > 0
    assert line["finish"] == [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
    assert 0 <= line["first_token_seconds"] <= line["total_seconds"]
    assert "error" not in line


async def test_a_refusal_is_a_line_with_the_name_of_its_error(api: HttpApi, log: pytest.LogCaptureFixture) -> None:
    await api.chat(messages=[{"role": "user", "content": SECRET}], temperature=SECRET)
    await api.http.get(f"/{SECRET}")
    refused, unknown = lines(log)
    assert (refused["status"], refused["error"]) == (400, "InvalidRequest")
    assert (unknown["status"], unknown["error"], unknown["handler"]) == (404, "UnknownRoute", "none")
    assert "prompt_tokens" not in refused


async def test_probes_are_not_logged(api: HttpApi, log: pytest.LogCaptureFixture) -> None:
    for path in ("/health", "/ready", "/ping", "/metrics", "/load", "/version"):
        await api.http.get(path)
    assert lines(log) == []


async def test_a_line_names_the_client_and_never_its_key(api: HttpApi, log: pytest.LogCaptureFixture) -> None:
    app = create_app(api.client, LIMITS, keys=KeyRing(parse_keys(f"alice {KEY}", "keys")))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pilotfish") as http:
        await http.post("/v1/completions", json={"prompt": SECRET}, headers={"authorization": f"Bearer {KEY}"})
        await http.post("/v1/completions", json={"prompt": SECRET}, headers={"authorization": f"Bearer {KEY}x"})
    answered, refused = lines(log)
    assert (answered["client"], answered["status"]) == ("alice", 200)
    assert (refused["error"], refused["status"]) == ("Unauthenticated", 401)
    assert "client" not in refused


async def test_a_grpc_call_is_a_line_too(api: HttpApi, log: pytest.LogCaptureFixture) -> None:
    servicer = RoutedGenerationServicer(api.client, 60.0)
    request = generation_pb2.GenerateRequest(text="hi", request_id="mine")
    async for _ in servicer.Generate(request, Remaining(9)):  # type: ignore[arg-type]
        pass
    api.engine.refusal = NotReady("starting")
    with pytest.raises(NotReady):
        async for _ in servicer.Generate(request, Remaining(9)):  # type: ignore[arg-type]
            pass
    answered, refused = lines(log)
    assert (answered["api"], answered["request_id"], answered["finish"]) == ("grpc", "mine", ["stop"])
    assert (refused["error"], refused["request_id"]) == ("NotReady", "mine")


FORGED = "x\nrequest request_id=forged api=grpc client=alice"


@pytest.mark.parametrize("request_id", [FORGED, "forged" * 50_000, ""], ids=["lines", "long", "empty"])
async def test_a_line_has_no_id_that_is_none(api: HttpApi, log: pytest.LogCaptureFixture, request_id: str) -> None:
    servicer = RoutedGenerationServicer(api.client, 60.0)
    request = generation_pb2.GenerateRequest(text="hi", request_id=request_id)
    with pytest.raises(InvalidRequest, match=r"^request_id: "):
        async for _ in servicer.Generate(request, Remaining(9)):  # type: ignore[arg-type]
            pass
    (line,) = lines(log)
    assert (line["api"], line["error"]) == ("grpc", "InvalidRequest")
    assert "request_id" not in line and "forged" not in log.text


async def test_an_internal_error_is_logged_with_an_id_or_not_reached(
    api: HttpApi, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object) -> AsyncIterator[Any]:
        raise NotReady("10.0.0.7:9000 is gone")
        yield

    monkeypatch.setattr(api.client, "generate", gone)
    client = PublicClient(api.client, lambda _: ClientLimitsSection())
    for request_id, error in (("fine", NotReady), (FORGED, InvalidRequest)):
        with pytest.raises(error):
            await anext(client.generate(generation_pb2.GenerateRequest(text="hi", request_id=request_id), 9.0))
    assert "request fine: NotReady: 10.0.0.7:9000 is gone" in log.text
    assert "forged" not in log.text
