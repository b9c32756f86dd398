"""Two doors to one room: HTTP over gRPC over real sockets, and gRPC itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from cluster.core.config import LimitsSection
from cluster.core.errors import DeadlineExceeded, InvalidRequest, NotReady, Overloaded, PilotfishError, UnknownModel
from cluster.ingress.grpc import GenerationServicer, OperationsServicer
from cluster.ingress.http import create_app
from cluster.wire.generation_client import GenerationClient
from cluster.wire.server import WireServer
from pilotfish.v1 import common_pb2, generation_pb2, generation_pb2_grpc, operations_pb2_grpc
from tests.support.fake_engine import CONTEXT, MODEL, VOCABULARY, OneMetric, Reciter, listening, room
from tests.support.http_app import chunks

LIMITS = LimitsSection(max_body_bytes=65536, max_output_tokens=32)
PATIENCE = 10.0
Request = generation_pb2.GenerateRequest
Sampling = common_pb2.SamplingParameters
Stopping = generation_pb2.StoppingCriteria
BeamSearch = generation_pb2.BeamSearch
HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class House:
    """Both doors, open."""

    engine: Reciter
    grpc_address: str
    client: GenerationClient
    http: httpx.AsyncClient

    async def over_grpc(self, request: Request) -> tuple[str, str]:
        """(error text, field) of a refusal, or the text."""
        try:
            text = ""
            async for response in self.client.generate(request, PATIENCE):
                text += response.delta.text
        except InvalidRequest as error:
            return str(error), error.field
        return text, ""

    async def over_http(self, body: dict[str, Any]) -> tuple[str, str]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        response = await self.http.post(path, json=body)
        if response.status_code == 200:
            choice = response.json()["choices"][0]
            return choice["message"]["content"] if "messages" in body else choice["text"], ""
        assert response.status_code in (400, 404)
        error = response.json()["error"]
        return error["message"], error["param"]


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    generation, engine, _ = room(tmp_path, limits=LIMITS)
    async with WireServer("127.0.0.1", 0, max_message_bytes=LIMITS.max_body_bytes) as server:
        server.add(
            "pilotfish.v1.GenerationService",
            generation_pb2_grpc.add_GenerationServiceServicer_to_server,
            GenerationServicer(generation),
        )
        server.add(
            "pilotfish.v1.OperationsService",
            operations_pb2_grpc.add_OperationsServiceServicer_to_server,
            OperationsServicer(OneMetric()),
        )
        port = await server.start()
        await server.set_serving("pilotfish.v1.GenerationService", True)

        grpc_address = f"127.0.0.1:{port}"

        async def resolve() -> str:
            return grpc_address

        client = GenerationClient(resolve)
        async with listening(create_app(client, LIMITS)) as address, httpx.AsyncClient(base_url=address) as http:
            yield House(engine, grpc_address, client, http)
        await client.close()


def tokens(*ids: int) -> Request:
    return Request(token_ids=common_pb2.TokenIds(ids=ids))


def turns(*turns: tuple[str, str]) -> Request:
    messages = [generation_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    return Request(chat=generation_pb2.ChatInput(messages=messages))


BAD_INPUT: list[tuple[str, dict[str, Any], Request, type[InvalidRequest], str]] = [
    ("an empty prompt", {"prompt": ""}, Request(text=""), InvalidRequest, "prompt"),
    (
        "a prompt longer than the context",
        {"prompt": "x" * CONTEXT},
        Request(text="x" * CONTEXT),
        InvalidRequest,
        "prompt",
    ),
    (
        "a prompt far longer than the context",
        {"prompt": "x" * 5000},
        Request(text="x" * 5000),
        InvalidRequest,
        "prompt",
    ),
    (
        "an answer longer than the context leaves",
        {"prompt": "x" * 50, "max_tokens": 32},
        Request(text="x" * 50, stopping=Stopping(max_tokens=32)),
        InvalidRequest,
        "max_tokens",
    ),
    (
        "an unknown model",
        {"prompt": "hi", "model": "gpt-4"},
        Request(text="hi", model="gpt-4"),
        UnknownModel,
        "model",
    ),
    (
        "a negative temperature",
        {"prompt": "hi", "temperature": -1},
        Request(text="hi", sampling=Sampling(temperature=-1)),
        InvalidRequest,
        "temperature",
    ),
    (
        "a top_p of zero",
        {"prompt": "hi", "top_p": 0},
        Request(text="hi", sampling=Sampling(top_p=0)),
        InvalidRequest,
        "top_p",
    ),
    (
        "a token beyond the vocabulary",
        {"prompt": [1, VOCABULARY]},
        tokens(1, VOCABULARY),
        InvalidRequest,
        "prompt[1]",
    ),
    (
        "a bias beyond its bound",
        {"prompt": "hi", "logit_bias": {"5": 1000}},
        Request(text="hi", sampling=Sampling(logit_bias=[common_pb2.LogitBias(token_id=5, bias=1000)])),
        InvalidRequest,
        "logit_bias[5]",
    ),
    (
        "more tokens than may be asked for",
        {"prompt": "hi", "max_tokens": 33},
        Request(text="hi", stopping=Stopping(max_tokens=33)),
        InvalidRequest,
        "max_tokens",
    ),
    (
        "an empty stop string",
        {"prompt": "hi", "stop": ""},
        Request(text="hi", stopping=Stopping(stop=[""])),
        InvalidRequest,
        "stop",
    ),
    ("no answer", {"prompt": "hi", "n": 0}, Request(text="hi", n=0), InvalidRequest, "n"),
    ("more answers than may be asked for", {"prompt": "hi", "n": 99}, Request(text="hi", n=99), InvalidRequest, "n"),
    (
        "more to choose from than may be made",
        {"prompt": "hi", "best_of": 99},
        Request(text="hi", best_of=99),
        InvalidRequest,
        "best_of",
    ),
    (
        "a choice of more than is made",
        {"prompt": "hi", "n": 3, "best_of": 2},
        Request(text="hi", n=3, best_of=2),
        InvalidRequest,
        "best_of",
    ),
    (
        "a salt beyond its bound",
        {"prompt": "hi", "cache_salt": "x" * 257},
        Request(text="hi", cache_salt="x" * 257),
        InvalidRequest,
        "cache_salt",
    ),
    (
        "a single beam",
        {"messages": HI, "use_beam_search": True},
        Request(chat=turns(("user", "hi")).chat, beam_search=BeamSearch()),
        InvalidRequest,
        "best_of",
    ),
    (
        "a length penalty beyond its bound",
        {"prompt": "hi", "n": 2, "use_beam_search": True, "length_penalty": 11},
        Request(text="hi", n=2, beam_search=BeamSearch(length_penalty=11)),
        InvalidRequest,
        "length_penalty",
    ),
    (
        "beams and a temperature",
        {"prompt": "hi", "n": 2, "use_beam_search": True, "temperature": 0.7},
        Request(text="hi", n=2, beam_search=BeamSearch(), sampling=Sampling(temperature=0.7)),
        InvalidRequest,
        "temperature",
    ),
    (
        "beams and a penalty",
        {"prompt": "hi", "n": 2, "use_beam_search": True, "presence_penalty": 1},
        Request(text="hi", n=2, beam_search=BeamSearch(), sampling=Sampling(presence_penalty=1)),
        InvalidRequest,
        "presence_penalty",
    ),
    (
        "beams and a stop string",
        {"prompt": "hi", "n": 2, "use_beam_search": True, "stop": "x"},
        Request(text="hi", n=2, beam_search=BeamSearch(), stopping=Stopping(stop=["x"])),
        InvalidRequest,
        "stop",
    ),
    (
        "a name that is none",
        {"prompt": "hi", "request_id": "a b"},
        Request(text="hi", request_id="a b"),
        InvalidRequest,
        "request_id",
    ),
    (
        "a larger tree of guesses than any target checks",
        {"prompt": "hi", "max_draft_tokens": 257},
        Request(text="hi", max_draft_tokens=257),
        InvalidRequest,
        "max_draft_tokens",
    ),
    ("no messages", {"messages": []}, turns(), InvalidRequest, "messages"),
    (
        "a role the template refuses",
        {"messages": [{"role": "villain", "content": "ha"}]},
        turns(("villain", "ha")),
        InvalidRequest,
        "messages",
    ),
    (
        "a role that is no word",
        {"messages": [{"role": "a b", "content": "ha"}]},
        turns(("a b", "ha")),
        InvalidRequest,
        "messages[0].role",
    ),
]


@pytest.mark.parametrize(
    ("body", "request_", "kind", "field"), [pytest.param(*row[1:], id=row[0]) for row in BAD_INPUT]
)
async def test_bad_input_gets_the_same_words_at_both_doors_and_the_next_request_works(
    house: House, body: dict[str, Any], request_: Request, kind: type[InvalidRequest], field: str
) -> None:
    with pytest.raises(kind):
        async for _ in house.client.generate(request_, PATIENCE):
            pass
    over_grpc = await house.over_grpc(request_)
    assert over_grpc == await house.over_http(body)
    assert over_grpc[1] == field
    assert await house.over_grpc(Request(text="hi")) == ("hello the world", "")
    assert await house.over_http({"prompt": "hi"}) == ("hello the world", "")
    assert await house.over_http({"messages": [{"role": "user", "content": "hi"}]}) == ("hello the world", "")


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(Overloaded("full", 2.0), 429), (NotReady("draining"), 503), (DeadlineExceeded("late"), 504)],
)
async def test_a_refusal_is_the_same_at_both_doors(house: House, refusal: PilotfishError, status: int) -> None:
    house.engine.refusal = refusal
    with pytest.raises(type(refusal), match=str(refusal)):
        await anext(house.client.generate(Request(text="hi"), PATIENCE))
    response = await house.http.post("/v1/completions", json={"prompt": "hi"})
    assert (response.status_code, response.json()["error"]["message"]) == (status, str(refusal))
    assert response.headers.get("retry-after") == ("2" if status == 429 else None)
    house.engine.refusal = None
    assert await house.over_http({"prompt": "hi"}) == ("hello the world", "")


async def test_text_that_is_no_utf8_is_refused_at_both_doors(house: House) -> None:
    broken = Request(text="hi").SerializeToString().replace(b"hi", b"\xff\xfe")
    async with grpc.aio.insecure_channel(house.grpc_address) as channel:
        call = channel.unary_stream("/pilotfish.v1.GenerationService/Generate")(broken, timeout=PATIENCE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    response = await house.http.post("/v1/completions", content=b'{"prompt": "\xff\xfe"}')
    assert response.status_code == 400
    assert await house.over_http({"prompt": "hi"}) == ("hello the world", "")


async def test_both_doors_give_the_same_answer_to_the_same_seed(house: House) -> None:
    await house.over_grpc(Request(text="hi", sampling=Sampling(seed=2**53)))
    await house.over_http({"prompt": "hi", "seed": 2**53})
    grpc_request, http_request = house.engine.requests
    assert grpc_request.sampling == http_request.sampling


async def test_both_doors_ask_for_the_same_answers(house: House) -> None:
    for search, wishes in (
        (None, {}),
        (
            BeamSearch(length_penalty=0.5, early_stopping=generation_pb2.EARLY_STOPPING_NEVER),
            {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"},
        ),
    ):
        house.engine.requests.clear()
        message = Request(text="hi", n=2, best_of=4, beam_search=search, cache_salt="mine", sampling=Sampling(seed=1))
        async for _ in house.client.generate(message, PATIENCE):
            pass
        await house.http.post(
            "/v1/completions", json={"prompt": "hi", "n": 2, "best_of": 4, "cache_salt": "mine", "seed": 1, **wishes}
        )
        over_grpc, over_http = house.engine.requests
        assert (over_grpc.n, over_grpc.beam, over_grpc.cache_salt) == (
            over_http.n,
            over_http.beam,
            over_http.cache_salt,
        )


@pytest.mark.parametrize(
    ("wishes", "most"),
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
async def test_both_doors_bound_the_drafts_of_a_request(
    house: House, prompt: dict[str, Any], wishes: dict[str, Any], most: int | None
) -> None:
    assert await house.over_http({**prompt, **wishes}) == ("hello the world", "")
    assert await house.over_grpc(Request(text="hi", max_draft_tokens=most)) == ("hello the world", "")
    assert [request.max_draft_tokens for request in house.engine.requests] == [most, most]


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"speculation": {"max_draft_tokens": -1}}, "speculation.max_draft_tokens"),
        ({"speculation": {"max_draft_tokens": 1.5}}, "speculation.max_draft_tokens"),
        ({"speculation": {"enabled": 1}}, "speculation.enabled"),
        ({"speculation": {"width": 1}}, "speculation.width"),
        ({"speculation": True}, "speculation"),
        ({"speculation": {"max_draft_tokens": 4}, "max_draft_tokens": 3}, "max_draft_tokens"),
        ({"speculation": {"enabled": False, "max_draft_tokens": 4}}, "speculation.enabled"),
        ({"speculation": {"enabled": False}, "max_draft_tokens": 4}, "speculation.enabled"),
        ({"speculation": {"enabled": True}, "max_draft_tokens": 0}, "speculation.enabled"),
    ],
)
async def test_a_wish_for_drafts_that_contradicts_itself_is_refused_by_name(
    house: House, wishes: dict[str, Any], field: str
) -> None:
    assert (await house.over_http({"prompt": "hi", **wishes}))[1] == field
    assert not house.engine.requests


async def test_answers_that_are_not_the_models_own_say_so_in_every_piece(house: House) -> None:
    for lossless in (True, False):
        house.engine.is_lossless = lossless
        events = [event async for event in house.client.generate(Request(text="hi"), PATIENCE)]
        assert {event.lossy for event in events} == {not lossless}
        for path, prompt in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": HI})):
            assert (await house.http.post(path, json=prompt)).json()["lossless"] is lossless
            wish = {"stream": True, "stream_options": {"include_usage": True}}
            pieces = chunks(await house.http.post(path, json={**prompt, **wish}))
            assert {piece["lossless"] for piece in pieces} == {lossless}
        assert (await house.http.get("/v1/models")).json()["data"][0]["lossless"] is lossless
        assert (await house.client.get_model(MODEL)).lossy is not lossless


async def test_an_http_client_that_leaves_cancels_the_call_behind_it(house: House) -> None:
    house.engine.hold_after = 1
    async with asyncio.timeout(PATIENCE):
        body = {"prompt": "hi", "stream": True}
        async with house.http.stream("POST", "/v1/completions", json=body) as response:
            await anext(response.aiter_lines())
        await house.engine.freed.get()


async def test_a_grpc_client_that_cancels_frees_its_answer(house: House) -> None:
    house.engine.hold_after = 1
    async with asyncio.timeout(PATIENCE):
        answer = house.client.generate(Request(text="hi", request_id="r"), PATIENCE)
        await anext(answer)
        await answer.aclose()
        assert await house.engine.freed.get() == "r"


async def test_an_answer_can_be_aborted_by_name(house: House) -> None:
    house.engine.hold_after = 1
    async with asyncio.timeout(PATIENCE):
        events = []
        async for event in house.client.generate(Request(text="hi", request_id="r"), PATIENCE):
            events.append(event)
            if event.HasField("delta"):
                assert await house.client.abort("r")
        assert events[-1].finished.reason == generation_pb2.FINISH_REASON_ABORT


async def test_models_metrics_and_readiness_pass_through(house: House) -> None:
    assert (await house.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert (await house.http.get("/metrics")).text == "answers_total 1\n"
    assert (await house.http.get("/ready")).status_code == 200
