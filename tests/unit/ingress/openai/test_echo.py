"""Completions that begin with their prompt, and log-probabilities of prompts, with a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.ingress.openai.formats import Choice, CompletionFormat
from cluster.ingress.openai.responses import ResponseOptions
from cluster.ingress.openai.stream import note_prompt
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.fakes.http_app import HttpApi, chunks

PROMPT, TEXT = "swim fish", "hello the world"


async def choices(api: HttpApi, **values: Any) -> list[Any]:
    response = await api.complete(**{"prompt": PROMPT, **values})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


async def test_the_text_begins_with_the_prompt(api: HttpApi) -> None:
    assert [choice["text"] for choice in await choices(api, echo=True, n=2)] == [PROMPT + TEXT] * 2
    ids = [*api.tokenizer.encode(PROMPT)]
    assert [choice["text"] for choice in await choices(api, echo=True, prompt=ids)] == [PROMPT + TEXT]
    two = await choices(api, echo=True, prompt=["one", "two"])
    assert [choice["text"] for choice in two] == ["one" + TEXT, "two" + TEXT]


async def test_a_stream_begins_with_the_prompt_of_each_choice(api: HttpApi) -> None:
    texts = ["", ""]
    for chunk in chunks(await api.complete(prompt=PROMPT, echo=True, n=2, stream=True)):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [PROMPT + TEXT] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_with_logprobs_every_prompt_token_but_the_first_has_one(api: HttpApi, stream: bool) -> None:
    response = await api.complete(prompt=PROMPT, echo=True, logprobs=2, max_tokens=1, stream=stream)
    parts = chunks(response)[:-1] if stream else [response.json()]
    logprobs = {
        name: [entry for part in parts for entry in part["choices"][0]["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    length = len(api.tokenizer.encode(PROMPT))
    assert "".join(logprobs["tokens"]).startswith(PROMPT)
    assert len(logprobs["tokens"]) == length + 1
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1:] == [-0.5] * length
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * length
    starts = [len("".join(logprobs["tokens"][:position])) for position in range(length + 1)]
    assert logprobs["text_offset"] == starts


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_is_sent_with_a_length_of_zero(api: HttpApi, stream: bool) -> None:
    values = {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": 1}
    response = await api.complete(**values, stream=stream, stream_options={"include_usage": True} if stream else None)
    parts = chunks(response) if stream else [response.json()]
    sent = [part["choices"][0] for part in parts if part["choices"]]
    assert "".join(choice["text"] for choice in sent) == PROMPT
    assert sent[-1]["finish_reason"] == "length"
    tokens = [token for choice in sent if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert len(tokens) == len(api.tokenizer.encode(PROMPT))
    assert parts[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_of_an_answer_that_is_aborted_before_it_is_computed_has_no_logprobs(
    api: HttpApi, stream: bool
) -> None:
    async def aborted(**values: Any) -> Any:
        waiting = asyncio.create_task(api.complete(prompt=PROMPT, stream=stream, **values))
        assert api.engine.abort(await api.engine.arrived.get())
        response = await waiting
        assert response.status_code == 200, response.text
        return (chunks(response) if stream else [response.json()])[0]["choices"][0]

    api.engine.hold_after = 0
    length = len(api.tokenizer.encode(PROMPT))
    echoed = await aborted(echo=True, logprobs=1, return_token_ids=True)
    assert (echoed["finish_reason"], len(echoed["prompt_token_ids"])) == ("abort", length)
    assert echoed["text"] == "".join(echoed["logprobs"]["tokens"]) == PROMPT
    assert echoed["logprobs"]["token_logprobs"] == echoed["logprobs"]["top_logprobs"] == [None] * length
    if not stream:
        assert (await aborted(prompt_logprobs=1))["prompt_logprobs"] == [None] * length


async def test_prompt_logprobs_have_vllms_form(api: HttpApi) -> None:
    tokens = api.tokenizer.encode(PROMPT)
    (choice,) = await choices(api, prompt_logprobs=2)
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [str(token) in entry for token, entry in zip(tokens[1:], others, strict=True)] == [True] * len(others)
    assert others[0][str(tokens[1])]["logprob"] == -0.5
    assert set(others[0][str(tokens[1])]) == {"logprob", "rank", "decoded_token"}
    body = (await api.chat(prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == len(api.engine.requests[-1].prompt)
    assert (await api.chat()).json()["prompt_logprobs"] is None


@pytest.mark.parametrize("earlier", [0, 9])
@pytest.mark.parametrize(
    ("prompt", "echoed", "offsets"),
    [(PROMPT, PROMPT, [0, 0, 4]), ("", f"<s> {PROMPT}", [0, 3, 8]), ("other", f"<s> {PROMPT}", [0, 3, 8])],
)
def test_what_the_tokenizer_adds_to_a_text_is_no_part_of_its_echo(
    earlier: int, prompt: str, echoed: str, offsets: list[int]
) -> None:
    """A choice that was received and not sent, before its client resumes the stream, begins with the prompt too."""
    scores = [common_pb2.TokenLogprobs(token_id=token, logprob=-0.5) for token in (5, 6)]
    started = generation_pb2.GenerationStarted(
        prompt_token_ids=[1, 5, 6], prompt_token_bytes=[b"<s>", b" swim", b" fish"], prompt_logprobs=scores
    )
    choice = Choice(0, prompt_text=prompt, text_length=earlier)
    note_prompt(choice, started, CompletionFormat(), ResponseOptions(logprobs=True, token_ids=False, echo=True))
    assert choice.echo == echoed
    assert [entry["text_offset"] for entry in choice.echo_logprobs] == offsets
    assert choice.text_length == len(echoed)
