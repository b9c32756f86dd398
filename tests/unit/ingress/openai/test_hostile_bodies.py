"""Bodies that would cost much time or memory are refused after little work."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.core.bounds import MAX_JSON_DEPTH
from cluster.core.errors import InvalidRequest, UnsupportedParameter
from cluster.ingress import http
from cluster.ingress.endpoints.messages import ConversationBody, MessagesBody
from cluster.ingress.endpoints.responses_body import ResponsesBody
from cluster.ingress.endpoints.tokens import DetokenizeBody, TokenizeBody
from cluster.ingress.endpoints.verification import VerifyBody
from cluster.ingress.openai import requests
from cluster.ingress.openai.fields.types import StrictModel
from cluster.ingress.openai.parse import parse
from cluster.ingress.openai.requests import ChatRequest, CompletionRequest
from tests.support.fakes.http_app import HI, JSON, HttpApi, error_of

MANY = 300_000
BODIES: dict[type[StrictModel], dict[str, Any]] = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": HI},
    ResponsesBody: {"input": "a"},
    ConversationBody: {"messages": HI},
    MessagesBody: {"messages": HI, "max_tokens": 1},
    TokenizeBody: {},
    DetokenizeBody: {},
    VerifyBody: {"request": {}, "receipt": {"seed": 1}},
}
"""The bodies of all routes, with the fields that each of them needs."""


def refusal(values: dict[str, object] | bytes) -> InvalidRequest:
    body = values if isinstance(values, bytes) else json.dumps({"prompt": "hi", **values}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse(CompletionRequest, body)
    return caught.value


def nested(levels: int) -> bytes:
    """Arrays in arrays; the innermost is empty."""
    return b"[" * levels + b"]" * levels


def test_an_unknown_name_is_cut_before_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = difflib.get_close_matches

    def recorded(word: str, *others: object, **options: object) -> list[str]:
        compared.append(len(word))
        return real(word, *others, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(difflib, "get_close_matches", recorded)
    error = refusal({"temperature" * 50_000: 1})
    assert compared and max(compared) <= 64
    assert len(error.field) <= 64
    assert len(str(error)) < 300


def test_too_many_biases_are_refused_before_any_of_them_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(requests, "_check_token_key", lambda _, key: read.append(key))
    error = refusal({"logit_bias": {f"wrong {index}": "wrong" for index in range(MANY)}})
    assert (error.field, error.value) == ("logit_bias", f"{MANY} entries")
    assert not read


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_no_field_of_any_body_has_an_error_for_each_entry(model: type[StrictModel]) -> None:
    """Four million bytes can hold two million wrong entries."""
    wrong_lists: list[list[Any]] = [[wrong] * 500 for wrong in (0.5, "x", {}, [], {"role": 1}, {"type": 1})]
    most: dict[str, int] = {}
    for name in model.model_fields:
        for entries in (*wrong_lists, *([entries] for entries in wrong_lists), {f"k{at}": 0.5 for at in range(500)}):
            try:
                model.model_validate({**BODIES[model], name: entries})
            except ValidationError as error:
                most[name] = max(most.get(name, 0), error.error_count())
            except InvalidRequest:
                most.setdefault(name, 1)
    assert len(most) > 2
    assert {name: count for name, count in most.items() if count > 4} == {}  # one for each type that is allowed


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_a_wrong_type_is_refused_with_the_name_of_its_field_alone(model: type[StrictModel]) -> None:
    named: dict[str, str] = {}
    for name in model.model_fields:
        try:
            parse(model, json.dumps({**BODIES[model], name: 1.5}).encode())
        except InvalidRequest as error:
            named[name] = error.field
    assert len(named) > 2
    assert named == {name: name for name in named}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", f"-{'9' * 400}.5"])
async def test_numbers_that_json_lacks_are_refused_by_name(tmp_path: Path, number: str) -> None:
    """A response that repeats one is no JSON."""
    api = HttpApi(tmp_path)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "hi", "metadata": {"a": [1, "@"]}},
        "/v1/completions": {"prompt": "hi", "temperature": "@"},
        "/v1/chat/completions": {"messages": HI, "nobody_knows_it": ["@"]},
        "/tokenize": {"messages": HI, "chat_template_kwargs": {"a": "@"}},
    }
    fields = ("metadata.a[1]", "temperature", "nobody_knows_it[0]", "chat_template_kwargs.a")
    for (path, body), field in zip(bodies.items(), fields, strict=True):
        for stream in (False, True):
            values = {**body, "stream": stream} if path.startswith("/v1/") else body
            content = json.dumps(values).replace('"@"', number)
            refused = await api.http.post(path, content=content, headers=JSON)
            assert refused.status_code == 400, (path, refused.text)
            assert error_of(refused)["param"] == field
            assert "a finite number" in error_of(refused)["message"]
    body = {"input": "hi", "metadata": {"a": [1, 1e300, -0.0, 5e-324]}}
    assert (await api.post("/v1/responses", **body)).json()["metadata"] == body["metadata"]


@pytest.mark.parametrize("levels", [MAX_JSON_DEPTH, 500, *range(940, 1000, 10), 965, 5000, 100_000])
@pytest.mark.parametrize("name", ["prompt", "stop", "messages", "tools", "nobody_knows_it"])
def test_a_body_that_is_nested_too_deep_is_refused_with_the_bound(levels: int, name: str) -> None:
    error = refusal(b'{"%s": %s}' % (name.encode(), nested(levels)))
    assert error.field == "body"
    assert error.bound == f"JSON that is nested at most {MAX_JSON_DEPTH} levels deep"


def test_a_body_at_the_bound_of_nesting_is_read() -> None:
    at_bound = nested(MAX_JSON_DEPTH - 1)
    error = refusal(b'{"prompt": "hi", "prompt_embeds": %s}' % at_bound)
    assert isinstance(error, UnsupportedParameter)
    assert error.field == "prompt_embeds"
    assert len(str(error)) < 300


def test_a_million_entries_are_not_written_out_for_an_error_message() -> None:
    class Counted(list[int]):
        shown = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for entry in super().__iter__():
                Counted.shown += 1
                yield entry

    message = str(InvalidRequest("stop", Counted(range(1_000_000)), "shorter"))
    assert message.startswith("stop: [0, 1, 2, 3, ")
    assert len(message) < 150
    assert Counted.shown < 100


@pytest.mark.parametrize(
    "value",
    [
        "short",
        b"short",
        5,
        None,
        [],
        {},
        (),
        (1,),
        ["a", 1, None],
        {"a": [1, {"b": 2.5}]},
        "it's",
        [[[[]]]],
        [(1, "x")],
    ],
)
def test_a_short_value_is_shown_as_it_is(value: object) -> None:
    assert str(InvalidRequest("field", value, "other")) == f"field: {value!r} is refused; it must be other"


async def test_many_answers_are_refused_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "Choice", None)  # nothing can be made
    api = HttpApi(tmp_path)
    for path, body in (("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/chat/completions", {"messages": HI})):
        error = error_of(await api.post(path, n=2**32 - 1, **body))
        assert (error["param"], error["message"]) == ("n", "n: 4294967295 is refused; it must be between 1 and 16")
