"""Bad input: both APIs give the same error, and the next request works."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.bounds import MAX_JSON_DEPTH
from cluster.core.errors import ContextLengthExceeded, InvalidRequest, UnknownModel
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.both_apis import HI, TIMEOUT_SECONDS, BeamSearch, BothApis, Request, Sampling, Stopping
from tests.support.fakes.both_apis import apis as apis
from tests.support.fakes.fake_engine import CONTEXT, VOCABULARY


def conversation(*messages: tuple[str, str]) -> generation_pb2.ChatInput:
    encoded = [generation_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return generation_pb2.ChatInput(messages=encoded)


BIASES = [common_pb2.LogitBias(token_id=5, bias=1000)]
BEAMS: dict[str, Any] = {"n": 2, "use_beam_search": True}
PARAMETERS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("a negative temperature", {"temperature": -1}, {"sampling": Sampling(temperature=-1)}, "temperature"),
    ("a top_p of zero", {"top_p": 0}, {"sampling": Sampling(top_p=0)}, "top_p"),
    ("too large a bias", {"logit_bias": {"5": 1000}}, {"sampling": Sampling(logit_bias=BIASES)}, "logit_bias[5]"),
    ("an empty stop string", {"stop": ""}, {"stopping": Stopping(stop=[""])}, "stop"),
    ("too many answers", {"n": 99}, {"n": 99}, "n"),
    ("a best_of below n", {"n": 3, "best_of": 2}, {"n": 3, "best_of": 2}, "best_of"),
    ("a salt beyond its bound", {"cache_salt": "x" * 257}, {"cache_salt": "x" * 257}, "cache_salt"),
    ("a single beam", {"use_beam_search": True}, {"beam_search": BeamSearch()}, "best_of"),
    (
        "a length penalty beyond its bound",
        BEAMS | {"length_penalty": 11},
        {"n": 2, "beam_search": BeamSearch(length_penalty=11)},
        "length_penalty",
    ),
    (
        "beams and a temperature",
        BEAMS | {"temperature": 0.7},
        {"n": 2, "beam_search": BeamSearch(), "sampling": Sampling(temperature=0.7)},
        "temperature",
    ),
    ("an invalid request id", {"request_id": "a b"}, {"request_id": "a b"}, "request_id"),
]
"""Parameters over HTTP and over gRPC, and the one that is refused."""
INPUTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("an empty prompt", {"prompt": ""}, {"text": ""}, "prompt"),
    (
        "a token beyond the vocabulary",
        {"prompt": [1, VOCABULARY]},
        {"token_ids": common_pb2.TokenIds(ids=[1, VOCABULARY])},
        "prompt[1]",
    ),
    ("no messages", {"messages": []}, {"chat": conversation()}, "messages"),
    (
        "a role the template refuses",
        {"messages": [{"role": "villain", "content": "ha"}]},
        {"chat": conversation(("villain", "ha"))},
        "messages",
    ),
    (
        "a role that is no word",
        {"messages": [{"role": "a b", "content": "ha"}]},
        {"chat": conversation(("a b", "ha"))},
        "messages[0].role",
    ),
]
PROMPT: tuple[dict[str, Any], dict[str, Any]] = {"prompt": "hi"}, {"text": "hi"}


@pytest.mark.parametrize(
    ("body", "fields", "kind", "field"),
    [
        *(
            pytest.param(PROMPT[0] | http, PROMPT[1] | fields, InvalidRequest, field, id=name)
            for name, http, fields, field in PARAMETERS
        ),
        *(pytest.param(http, fields, InvalidRequest, field, id=name) for name, http, fields, field in INPUTS),
        ({"prompt": "x" * CONTEXT}, {"text": "x" * CONTEXT}, ContextLengthExceeded, "prompt"),
        ({"prompt": "x" * 5000}, {"text": "x" * 5000}, ContextLengthExceeded, "prompt"),
        (
            {"prompt": "hi", "max_tokens": CONTEXT + 1},
            {"text": "hi", "stopping": Stopping(max_tokens=CONTEXT + 1)},
            ContextLengthExceeded,
            "max_tokens",
        ),
        ({"prompt": "hi", "model": "gpt-4"}, {"text": "hi", "model": "gpt-4"}, UnknownModel, "model"),
    ],
)
async def test_bad_input_gets_the_same_error_in_both_apis_and_the_next_request_works(
    apis: BothApis, body: dict[str, Any], fields: dict[str, Any], kind: type[InvalidRequest], field: str
) -> None:
    request = Request(**fields)
    with pytest.raises(kind):
        async for _ in apis.client.generate(request, TIMEOUT_SECONDS):
            pass
    over_grpc = await apis.over_grpc(request)
    assert over_grpc == await apis.over_http(body)
    assert over_grpc[1] == field
    assert await apis.over_grpc(Request(text="hi")) == ("hello the world", "")
    assert await apis.over_http({"prompt": "hi"}) == ("hello the world", "")
    assert await apis.over_http({"messages": HI}) == ("hello the world", "")


async def test_tools_and_variables_that_are_nested_too_deep_are_refused(apis: BothApis) -> None:
    deep = '{"a": ' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}"
    messages = [generation_pb2.ChatMessage(role="user", content="hi")]
    tools = generation_pb2.ChatInput(messages=messages, tools=[deep])
    variables = generation_pb2.ChatInput(messages=messages, template_arguments=deep)
    assert (await apis.over_grpc(Request(chat=tools)))[1] == "tools[0]"
    assert (await apis.over_grpc(Request(chat=variables)))[1] == "chat_template_kwargs"
