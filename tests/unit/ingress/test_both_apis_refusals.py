"""Bad input: both APIs give the same error, and the next request works."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.both_apis import HI, TIMEOUT_SECONDS, BeamSearch, BothApis, Request, Sampling, Stopping
from tests.support.fakes.both_apis import apis as apis
from tests.support.fakes.fake_engine import CONTEXT, VOCABULARY


def tokens(*ids: int) -> Request:
    return Request(token_ids=common_pb2.TokenIds(ids=ids))


def conversation(*messages: tuple[str, str]) -> Request:
    encoded = [generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return Request(chat=generation_pb2.ChatInput(messages=encoded))


BAD_INPUT: list[tuple[str, dict[str, Any], Request, type[InvalidRequest], str]] = [
    ("an empty prompt", {"prompt": ""}, Request(text=""), InvalidRequest, "prompt"),
    (
        "a prompt longer than the context",
        {"prompt": "x" * CONTEXT},
        Request(text="x" * CONTEXT),
        ContextLengthExceeded,
        "prompt",
    ),
    (
        "a prompt far longer than the context",
        {"prompt": "x" * 5000},
        Request(text="x" * 5000),
        ContextLengthExceeded,
        "prompt",
    ),
    (
        "an answer longer than the context",
        {"prompt": "hi", "max_tokens": CONTEXT + 1},
        Request(text="hi", stopping=Stopping(max_tokens=CONTEXT + 1)),
        ContextLengthExceeded,
        "max_tokens",
    ),
    ("an unknown model", {"prompt": "hi", "model": "gpt-4"}, Request(text="hi", model="gpt-4"), UnknownModel, "model"),
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
    ("a token beyond the vocabulary", {"prompt": [1, VOCABULARY]}, tokens(1, VOCABULARY), InvalidRequest, "prompt[1]"),
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
        "a best_of above the limit",
        {"prompt": "hi", "best_of": 99},
        Request(text="hi", best_of=99),
        InvalidRequest,
        "best_of",
    ),
    (
        "a best_of below n",
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
        Request(chat=conversation(("user", "hi")).chat, beam_search=BeamSearch()),
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
        "an invalid request id",
        {"prompt": "hi", "request_id": "a b"},
        Request(text="hi", request_id="a b"),
        InvalidRequest,
        "request_id",
    ),
    (
        "a draft tree above the bound",
        {"prompt": "hi", "max_draft_tokens": 257},
        Request(text="hi", max_draft_tokens=257),
        InvalidRequest,
        "max_draft_tokens",
    ),
    ("no messages", {"messages": []}, conversation(), InvalidRequest, "messages"),
    (
        "a role the template refuses",
        {"messages": [{"role": "villain", "content": "ha"}]},
        conversation(("villain", "ha")),
        InvalidRequest,
        "messages",
    ),
    (
        "a role that is no word",
        {"messages": [{"role": "a b", "content": "ha"}]},
        conversation(("a b", "ha")),
        InvalidRequest,
        "messages[0].role",
    ),
]


@pytest.mark.parametrize(
    ("body", "request_", "kind", "field"), [pytest.param(*row[1:], id=row[0]) for row in BAD_INPUT]
)
async def test_bad_input_gets_the_same_error_in_both_apis_and_the_next_request_works(
    apis: BothApis, body: dict[str, Any], request_: Request, kind: type[InvalidRequest], field: str
) -> None:
    with pytest.raises(kind):
        async for _ in apis.client.generate(request_, TIMEOUT_SECONDS):
            pass
    over_grpc = await apis.over_grpc(request_)
    assert over_grpc == await apis.over_http(body)
    assert over_grpc[1] == field
    assert await apis.over_grpc(Request(text="hi")) == ("hello the world", "")
    assert await apis.over_http({"prompt": "hi"}) == ("hello the world", "")
    assert await apis.over_http({"messages": [{"role": "user", "content": "hi"}]}) == ("hello the world", "")
