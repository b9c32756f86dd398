"""The HTTP API over a scripted engine, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import (
    DeadlineExceeded,
    DrafterUnavailable,
    InvalidRequest,
    KvPoolExhausted,
    NotReady,
    Overloaded,
    TargetUnavailable,
)
from cluster.ingress.http import create_app
from tests.support.fakes.fake_engine import CONTEXT, MODEL, VOCABULARY
from tests.support.fakes.http_app import HI, JSON, LIMITS, HttpApi, chunks, error_of


async def test_a_chat_is_answered_whole(api: HttpApi) -> None:
    response = await api.chat(model=MODEL, seed=11)
    body = response.json()
    assert response.status_code == 200
    assert (body["object"], body["model"], body["seed"]) == ("chat.completion", MODEL, 11)
    choice = body["choices"][0]
    nothing = {"reasoning_content": None, "reasoning": None}
    assert choice["message"] == {"role": "assistant", "content": "hello the world", **nothing}
    assert (choice["finish_reason"], choice["index"], choice["logprobs"]) == ("stop", 0, None)
    assert body["system_fingerprint"].startswith("pilotfish-")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
async def test_the_engine_knows_whether_an_answer_is_streamed(api: HttpApi, path: str, body: dict[str, Any]) -> None:
    for streams in (False, True, None):
        assert (await api.post(path, **body, **({} if streams is None else {"stream": streams}))).status_code == 200
    assert [one.streams for one in api.engine.requests] == [False, True, False]


async def test_usage_has_accepted_and_rejected_draft_tokens(api: HttpApi) -> None:
    usage = (await api.chat()).json()["usage"]
    details = usage["completion_tokens_details"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < details["accepted_prediction_tokens"] < usage["completion_tokens"]
    assert details["rejected_prediction_tokens"] > 0


async def test_a_drawn_seed_is_reported(api: HttpApi) -> None:
    body = (await api.chat()).json()
    assert body["seed"] == api.engine.requests[0].sampling.seed


async def test_a_chat_streams_one_chunk_per_commit_then_its_end(api: HttpApi) -> None:
    events = chunks(await api.chat(stream=True))
    assert [event["object"] for event in events] == ["chat.completion.chunk"] * len(events)
    assert len({event["id"] for event in events}) == 1
    assert len({event["seed"] for event in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "hello the world"
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all("usage" not in event for event in events)


async def test_a_stream_ends_with_its_usage_when_asked(api: HttpApi) -> None:
    *events, last = chunks(await api.chat(stream=True, stream_options={"include_usage": True}))
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == (await api.chat()).json()["usage"]


async def test_a_chunk_without_text_is_skipped_unless_token_ids_are_requested(tmp_path: Path) -> None:
    api = HttpApi(tmp_path, "🐟🐟🐟")
    silent = chunks(await api.chat(stream=True))
    assert all(event["choices"][0]["delta"].get("content") for event in silent[:-1])
    full = chunks(await api.chat(stream=True, return_token_ids=True))
    assert len(full) > len(silent)
    token_ids = [token for event in full[:-1] for token in event["choices"][0]["token_ids"]]
    assert token_ids == [*api.tokenizer.encode("🐟🐟🐟"), 2]
    assert full[0]["choices"][0]["accepted_draft_tokens"] == 2


async def test_token_ids_of_an_answer_come_with_its_accepted_draft_tokens(api: HttpApi) -> None:
    body = (await api.complete(return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["token_ids"] == [*api.tokenizer.encode("hello the world"), 2]
    assert choice["accepted_draft_tokens"] == body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


async def test_several_prompts_become_choices_in_order(api: HttpApi) -> None:
    tokenizer = api.tokenizer
    api.engine.script = lambda request: (*request.prompt, 2)
    body = (await api.complete(prompt=["one", "two", "three"])).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "one"), (1, "two"), (2, "three")]
    ids = [list(tokenizer.encode("fish")), list(tokenizer.encode("swim"))]
    streamed = chunks(await api.complete(prompt=ids, stream=True))
    texts = ["", ""]
    for event in streamed:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == ["fish", "swim"]
    assert body["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text)) for text in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("prompts", "field"),
    [(["hi", ""], "prompt[1]"), ([[5], [6, 7], [8, 300]], "prompt[2][1]"), (["hi", "hi " * 100], "prompt[1]")],
)
async def test_an_error_of_one_of_several_prompts_says_of_which(api: HttpApi, prompts: list[Any], field: str) -> None:
    assert error_of(await api.complete(prompt=prompts))["param"] == field


async def test_chat_logprobs_have_token_bytes_and_alternatives(api: HttpApi) -> None:
    choice = (await api.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"hello the world<|im_end|>"
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert entries[0]["top_logprobs"][0] == {name: entries[0][name] for name in ("token", "logprob", "bytes")}


async def test_completion_logprobs_have_offsets(api: HttpApi) -> None:
    for body in ({}, {"stream": True}):
        response = await api.complete(logprobs=1, **body)
        parts = chunks(response)[:-1] if body else [response.json()]
        logprobs = [part["choices"][0]["logprobs"] for part in parts]
        tokens = [token for part in logprobs for token in part["tokens"]]
        offsets = [offset for part in logprobs for offset in part["text_offset"]]
        assert "".join(tokens) == "hello the world<|im_end|>"
        assert offsets == [len("".join(tokens[:position])) for position in range(len(tokens))]
        assert logprobs[0]["top_logprobs"][0][tokens[0]] == -0.5


async def test_models_are_listed_and_found(api: HttpApi) -> None:
    listed = (await api.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await api.http.get("/v1/models/")).json() == listed
    assert (await api.http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    response = await api.http.get("/v1/models/org/other")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


async def test_health_readiness_and_metrics(api: HttpApi) -> None:
    assert (await api.http.get("/health")).status_code == 200
    assert (await api.http.get("/ready")).status_code == 200
    api.engine.ready = False
    assert (await api.http.get("/ready")).status_code == 503
    assert (await api.http.get("/health")).status_code == 200
    api.client.reachable = False
    assert (await api.http.get("/health")).status_code == 503
    metrics = await api.http.get("/metrics")
    assert metrics.text.startswith("answers_total 1\n# HELP http_requests_total")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4"


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Overloaded("the queue is full", 2.2), 429, "rate_limit_error"),
        (NotReady("draining"), 503, "server_error"),
        (TargetUnavailable("gone"), 503, "server_error"),
        (DrafterUnavailable("gone"), 503, "server_error"),
        (KvPoolExhausted("3 blocks are needed"), 503, "server_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_event_has_its_status_also_for_a_stream(
    api: HttpApi, refusal: Any, status: int, kind: str, stream: bool
) -> None:
    api.engine.refusal = refusal
    response = await api.chat(stream=stream)
    assert (response.status_code, error_of(response)["type"]) == (status, kind)
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)
    api.engine.refusal = None
    assert (await api.chat(stream=stream)).status_code == 200


async def test_an_error_in_mid_stream_is_an_event_and_the_stream_ends(api: HttpApi) -> None:
    api.engine.failure = DeadlineExceeded("the deadline passed")
    *_, last = chunks(await api.chat(stream=True))
    assert last["error"] == {
        "message": "the deadline passed", "type": "timeout_error", "param": None, "code": "deadline_exceeded",
    }  # fmt: skip


async def test_an_error_in_mid_stream_names_the_clients_own_parameter(api: HttpApi) -> None:
    api.engine.failure = InvalidRequest("max_tokens", 8, "less")
    *_, last = chunks(await api.chat(max_completion_tokens=8, stream=True))
    assert last["error"]["param"] == "max_completion_tokens"


async def test_no_top_logprobs_may_be_asked_for_without_logprobs(api: HttpApi) -> None:
    response = await api.chat(top_logprobs=0)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"] is None
    assert error_of(await api.chat(top_logprobs=1))["param"] == "top_logprobs"


async def test_an_unexpected_error_is_logged_and_its_text_is_not_sent(
    api: HttpApi, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> Any:
        raise RuntimeError("secret")

    api.engine.script = fail
    response = await api.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "my-1"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "request my-1 failed" in caplog.text
    assert "secret" in caplog.text
    assert error_of(response)["type"] == "server_error"
    assert response.headers["x-request-id"] == "my-1"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405)],
)
async def test_errors_for_unknown_paths_and_methods_have_openais_format(
    api: HttpApi, method: str, path: str, status: int
) -> None:
    response = await api.http.request(method, path)
    assert (response.status_code, error_of(response)["type"]) == (status, "invalid_request_error")


async def test_a_body_over_the_bound_is_refused_declared_or_not(api: HttpApi) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    for content in (b"x" * 5000, endless()):
        response = await api.http.post("/v1/completions", content=content, headers=JSON)
        assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")
    assert (await api.complete()).status_code == 200


async def test_a_length_of_thousands_of_digits_is_a_length(api: HttpApi) -> None:
    body = b'{"prompt": "hi"}'
    for length, status in ((f"{'0' * 5000}{len(body)}", 200), ("9" * 5000, 413)):
        response = await api.http.post("/v1/completions", content=body, headers={**JSON, "content-length": length})
        assert response.status_code == status, response.text


async def test_a_form_is_refused_because_it_is_not_json(api: HttpApi) -> None:
    response = await api.http.post("/v1/completions", data={"prompt": "hi"})
    assert response.status_code == 400
    assert "application/json" in error_of(response)["message"]


async def test_a_client_may_shorten_the_deadline(api: HttpApi) -> None:
    for header, expected in (("2.5", 2.5), ("1e9", LIMITS.max_timeout_seconds)):
        response = await api.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-timeout": header})
        assert response.status_code == 200
        assert api.client.timeouts[-1] == expected
    for header in ("soon", "-1", "nan", "inf"):
        response = await api.http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-timeout": header})
        assert error_of(response)["param"] == "x-request-timeout"


async def test_a_lone_surrogate_in_the_name_of_an_ignored_field_is_no_part_of_the_header(api: HttpApi) -> None:
    named = await api.http.post("/v1/completions", content=rb'{"prompt": "hi", "\ud800": 1}', headers=JSON)
    assert (named.status_code, named.headers["x-ignored-fields"]) == (200, "?")


async def test_a_misspelt_field_is_named_with_the_one_that_was_meant(
    api: HttpApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    body = {"prompt": "hi", "temprature": 1, "colour": "red"}
    response = await api.http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "temprature, colour"
    assert response.headers["x-misspelt-fields"] == "temprature=temperature"
    assert "unknown field temprature, which is ignored; did it mean temperature?" in caplog.text
    assert "colour" not in caplog.text


@pytest.mark.parametrize("role", ["usr", "asistant", "systm"])
async def test_a_misspelt_role_is_refused_with_the_one_that_was_meant(api: HttpApi, role: str) -> None:
    body = {"messages": [{"role": role, "content": "hi"}]}
    error = error_of(await api.http.post("/v1/chat/completions", json=body))
    meant = {"usr": "user", "asistant": "assistant", "systm": "system"}[role]
    assert (
        error["message"] == f"messages[0].role: '{role}' is refused; it must be {meant}, of which it is a misspelling"
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_one_field_has_one_bound(api: HttpApi, name: str) -> None:
    bounds = set()
    for value in (-1, 1 << 32, 1 << 70):
        body = {"messages": [{"role": "user", "content": "hi"}], name: value}
        error = error_of(await api.http.post("/v1/chat/completions", json=body))
        assert error["param"] == name
        bounds.add(error["message"].partition("it must be ")[2])
    assert bounds == {"at least 1, and at most the context of the model"}


def test_the_application_describes_its_requests(tmp_path: Path) -> None:
    schema = create_app(HttpApi(tmp_path).client, LIMITS).openapi()
    body = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert "messages" in schema["components"]["schemas"]["ChatRequest"]["properties"]


@pytest.mark.parametrize(
    ("path", "values", "param"),
    [
        ("chat/completions", {"n": 0}, "n"),
        ("chat/completions", {"n": 17}, "n"),
        ("chat/completions", {"max_tokens": 100_000}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 100_000}, "max_completion_tokens"),
        ("chat/completions", {"max_completion_tokens": CONTEXT + 1}, "max_completion_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"top_k": 2**20 + 1}, "top_k"),
        ("completions", {"best_of": 0}, "best_of"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"stop_token_ids": [VOCABULARY]}, "stop_token_ids[0]"),
        ("completions", {"logit_bias": {str(VOCABULARY): 1}}, "logit_bias"),
        ("completions", {"max_draft_tokens": 257}, "max_draft_tokens"),
        ("completions", {"speculation": {"max_draft_tokens": 257}}, "speculation.max_draft_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_names_the_parameter_that_the_client_sent(
    api: HttpApi, path: str, values: dict[str, Any], param: str, stream: bool
) -> None:
    prompt = {"prompt": "hi"} if path == "completions" else {"messages": HI}
    response = await api.post(f"/v1/{path}", **prompt, **values, stream=stream)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert not api.engine.requests


async def test_usage_counts_the_prediction_of_the_client_as_openai_does(api: HttpApi) -> None:
    prediction = {"type": "content", "content": "hello the sea"}
    details = (await api.chat(prediction=prediction)).json()["usage"]["completion_tokens_details"]
    expected, written = (api.tokenizer.encode(text) for text in ("hello the sea", "hello the world"))
    same = next(index for index, (a, b) in enumerate(zip(expected, written, strict=False)) if a != b)
    assert details["accepted_prediction_tokens"] == same
    assert details["rejected_prediction_tokens"] == len(expected) - same


@pytest.mark.parametrize("token", [-1, 2**40])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
async def test_a_token_that_no_model_has_is_refused_without_a_second_bound(api: HttpApi, name: str, token: int) -> None:
    response = await api.complete(**{name: [7, token]})
    assert response.status_code == 400
    expected = f"{name}[1]: {token} is refused; it must be a token id of the model's vocabulary"
    assert response.json()["error"]["message"] == expected
