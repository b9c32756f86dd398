"""HTTP over gRPC over real sockets, and gRPC itself: the same answers from both."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from cluster.core.errors import DeadlineExceeded, NotReady, Overloaded, PilotfishError
from pilotfish.v1 import generation_pb2
from tests.support.deadline import deadline
from tests.support.fakes.both_apis import HI, TIMEOUT_SECONDS, BeamSearch, BothApis, Request, Sampling
from tests.support.fakes.both_apis import apis as apis
from tests.support.fakes.fake_engine import MODEL
from tests.support.fakes.http_app import JSON, chunks


@pytest.mark.parametrize(
    ("refusal", "status", "message"),
    [
        (Overloaded("full", 2.0), 429, "full"),
        (NotReady("draining"), 503, "the server cannot answer now; try again"),
        (DeadlineExceeded("late"), 504, "late"),
    ],
)
async def test_an_engine_error_is_the_same_in_both_apis(
    apis: BothApis, refusal: PilotfishError, status: int, message: str
) -> None:
    """Over HTTP, a client learns nothing of what happens inside. Over gRPC, this is the service behind the ingress."""
    apis.engine.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        await anext(apis.client.generate(Request(text="hi"), TIMEOUT_SECONDS))
    response = await apis.http.post("/v1/completions", json={"prompt": "hi"})
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    assert response.headers.get("retry-after") == {429: "2", 503: "1"}.get(status)
    apis.engine.refusal = None
    assert await apis.over_http({"prompt": "hi"}) == ("hello the world", "")


async def test_text_that_is_not_utf8_is_refused_by_both_apis(apis: BothApis) -> None:
    broken = Request(text="hi").SerializeToString().replace(b"hi", b"\xff\xfe")
    async with grpc.aio.insecure_channel(apis.grpc_address) as channel:
        call = channel.unary_stream("/pilotfish.v1.GenerationService/Generate")(broken, timeout=TIMEOUT_SECONDS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    response = await apis.http.post("/v1/completions", content=b'{"prompt": "\xff\xfe"}', headers=JSON)
    assert response.status_code == 400
    assert await apis.over_http({"prompt": "hi"}) == ("hello the world", "")


async def test_both_apis_sample_with_the_same_seed(apis: BothApis) -> None:
    await apis.over_grpc(Request(text="hi", sampling=Sampling(seed=2**53)))
    await apis.over_http({"prompt": "hi", "seed": 2**53})
    grpc_request, http_request = apis.engine.requests
    assert grpc_request.sampling == http_request.sampling


async def test_both_apis_request_the_same_answers(apis: BothApis) -> None:
    for search, parameters in (
        (None, {}),
        (
            BeamSearch(length_penalty=0.5, early_stopping=generation_pb2.EARLY_STOPPING_NEVER),
            {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"},
        ),
    ):
        apis.engine.requests.clear()
        message = Request(text="hi", n=2, best_of=4, beam_search=search, cache_salt="mine", sampling=Sampling(seed=1))
        async for _ in apis.client.generate(message, TIMEOUT_SECONDS):
            pass
        await apis.http.post(
            "/v1/completions",
            json={"prompt": "hi", "n": 2, "best_of": 4, "cache_salt": "mine", "seed": 1, **parameters},
        )
        over_grpc, over_http = apis.engine.requests
        assert (over_grpc.n, over_grpc.beam, over_grpc.cache_salt) == (
            over_http.n,
            over_http.beam,
            over_http.cache_salt,
        )


@pytest.mark.parametrize(
    ("parameters", "most"),
    [
        ({}, None),
        ({"max_draft_tokens": 3}, 3),
        ({"max_draft_tokens": 0}, 0),
        ({"speculation": {}}, None),
        ({"speculation": {"enabled": True}}, None),
        ({"speculation": {"enabled": False}}, 0),
        ({"speculation": {"max_draft_tokens": 256}}, 256),
        ({"speculation": {"enabled": True, "max_draft_tokens": 5}, "max_draft_tokens": 5}, 5),
        ({"speculation": {"enabled": False, "max_draft_tokens": 0}}, 0),
        ({"speculation": {"enabled": False}, "max_draft_tokens": 0}, 0),
    ],
)
@pytest.mark.parametrize("prompt", [{"prompt": "hi"}, {"messages": HI}], ids=["completion", "chat"])
async def test_both_apis_bound_the_drafts_of_a_request(
    apis: BothApis, prompt: dict[str, Any], parameters: dict[str, Any], most: int | None
) -> None:
    assert await apis.over_http({**prompt, **parameters}) == ("hello the world", "")
    assert await apis.over_grpc(Request(text="hi", max_draft_tokens=most)) == ("hello the world", "")
    assert [request.max_draft_tokens for request in apis.engine.requests] == [most, most]


PARTS = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]


@pytest.mark.parametrize("content", ["hello world", PARTS], ids=["text", "parts"])
@pytest.mark.parametrize("prompt", [{"prompt": "hi"}, {"messages": HI}], ids=["completion", "chat"])
async def test_both_apis_take_a_prediction_and_a_minimal_length(
    apis: BothApis, prompt: dict[str, Any], content: object
) -> None:
    parameters = {"prediction": {"type": "content", "content": content}, "min_tokens": 2, "seed": 1}
    assert await apis.over_http({**prompt, **parameters}) == ("hello the world", "")
    stopping = generation_pb2.StoppingCriteria(min_tokens=2)
    message = Request(text="hi", prediction_text="hello world", stopping=stopping, sampling=Sampling(seed=1))
    assert await apis.over_grpc(message) == ("hello the world", "")
    over_http, over_grpc = apis.engine.requests
    assert (over_http.prediction, over_http.sampling) == (over_grpc.prediction, over_grpc.sampling)
    assert over_http.prediction and over_http.sampling.min_tokens == 2


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"prediction": "hello"}, "prediction"),
        ({"prediction": {"type": "text", "content": "hello"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text"),
        ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0].type"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
        ({"speculation": {"max_draft_tokens": 1.5}}, "speculation.max_draft_tokens"),
        ({"speculation": {"enabled": 1}}, "speculation.enabled"),
        ({"speculation": True}, "speculation"),
        ({"speculation": {"max_draft_tokens": 4}, "max_draft_tokens": 3}, "max_draft_tokens"),
        ({"speculation": {"enabled": False, "max_draft_tokens": 4}}, "speculation.enabled"),
        ({"speculation": {"enabled": False}, "max_draft_tokens": 4}, "speculation.enabled"),
        ({"speculation": {"enabled": True}, "max_draft_tokens": 0}, "speculation.enabled"),
    ],
)
async def test_wrong_or_contradictory_parameters_are_refused_by_name(
    apis: BothApis, parameters: dict[str, Any], field: str
) -> None:
    assert (await apis.over_http({"prompt": "hi", **parameters}))[1] == field
    assert not apis.engine.requests


async def test_every_response_of_a_lossy_server_says_so(apis: BothApis) -> None:
    for lossless in (True, False):
        apis.engine.is_lossless = lossless
        events = [event async for event in apis.client.generate(Request(text="hi"), TIMEOUT_SECONDS)]
        assert {event.lossy for event in events} == {not lossless}
        for path, prompt in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": HI})):
            assert (await apis.http.post(path, json=prompt)).json()["lossless"] is lossless
            streamed = {"stream": True, "stream_options": {"include_usage": True}}
            pieces = chunks(await apis.http.post(path, json={**prompt, **streamed}))
            assert {piece["lossless"] for piece in pieces} == {lossless}
        assert (await apis.http.get("/v1/models")).json()["data"][0]["lossless"] is lossless
        assert (await apis.client.get_model(MODEL)).lossy is not lossless


async def test_an_http_client_that_disconnects_cancels_its_grpc_call(apis: BothApis) -> None:
    apis.engine.hold_after = 1
    async with deadline(TIMEOUT_SECONDS):
        body = {"prompt": "hi", "stream": True}
        async with apis.http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
        await apis.engine.freed.get()


async def test_a_grpc_client_that_cancels_frees_its_answer(apis: BothApis) -> None:
    apis.engine.hold_after = 1
    async with deadline(TIMEOUT_SECONDS):
        answer = apis.client.generate(Request(text="hi", request_id="r"), TIMEOUT_SECONDS)
        await anext(answer)
        await answer.aclose()
        assert await apis.engine.freed.get() == "r"


async def test_an_answer_can_be_aborted_by_its_id(apis: BothApis) -> None:
    apis.engine.hold_after = 1
    async with deadline(TIMEOUT_SECONDS):
        events = []
        async for event in apis.client.generate(Request(text="hi", request_id="r"), TIMEOUT_SECONDS):
            events.append(event)
            if event.HasField("delta"):
                assert await apis.client.abort("r")
        assert events[-1].finished.reason == generation_pb2.FINISH_REASON_ABORT


async def test_models_metrics_and_readiness_are_forwarded(apis: BothApis) -> None:
    assert (await apis.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await apis.http.get("/metrics")).text.startswith("answers_total 1\n")
    assert (await apis.http.get("/ready")).status_code == 200
