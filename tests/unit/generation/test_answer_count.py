"""Several answers to one prompt over HTTP: samples, the best of samples, beams."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.core.request import BeamParameters
from tests.support.fakes.http_app import HttpApi, chunks


def by_seed(api: HttpApi, *texts: str) -> None:
    """Let the answer to seed `i` be `texts[i]`, the later the more probable."""
    scripts = [(*api.tokenizer.encode(text), 2) for text in texts]
    api.engine.script = lambda request: scripts[request.sampling.seed]
    api.engine.certainty = lambda request: request.sampling.seed - 9.0


def texts_of(events: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_n_answers_have_consecutive_seeds_and_count_their_prompt_once(api: HttpApi, endpoint: str) -> None:
    by_seed(api, "hello", "the world", "fish swim the world")
    ask = getattr(api, endpoint)
    single = (await ask(seed=0)).json()["usage"]["prompt_tokens"]
    body = (await ask(n=3, seed=0)).json()
    assert len(api.engine.requests) == 2
    texts = [choice["message"]["content"] if endpoint == "chat" else choice["text"] for choice in body["choices"]]
    assert texts == ["hello", "the world", "fish swim the world"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == single
    assert body["usage"]["completion_tokens"] == sum(len(api.tokenizer.encode(text)) + 1 for text in texts)


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_n_answers_are_streamed_interleaved(api: HttpApi, endpoint: str) -> None:
    by_seed(api, "hello the world", "the world fish swim")
    *events, last = chunks(
        await getattr(api, endpoint)(n=2, seed=0, stream=True, stream_options={"include_usage": True})
    )
    assert texts_of(events) == {0: "hello the world", 1: "the world fish swim"}
    order = [event["choices"][0]["index"] for event in events]
    assert order[:4] == [0, 1, 0, 1]
    ends = [event["choices"][0]["index"] for event in events if event["choices"][0]["finish_reason"] is not None]
    assert ends == [0, 1]
    whole = (await getattr(api, endpoint)(n=2, seed=0)).json()
    assert last["usage"] == whole["usage"]


async def test_answers_to_several_prompts_are_numbered_prompt_by_prompt(api: HttpApi) -> None:
    api.engine.script = lambda request: (*request.prompt, *api.tokenizer.encode(str(request.sampling.seed)), 2)
    body = (await api.complete(prompt=["one", "two"], n=2, seed=0)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "one0"),
        (1, "one1"),
        (2, "two0"),
        (3, "two1"),
    ]
    assert body["usage"]["prompt_tokens"] == len(api.tokenizer.encode("one")) + len(api.tokenizer.encode("two"))
    streamed = chunks(await api.complete(prompt=["one", "two"], n=2, seed=0, stream=True))
    assert texts_of(streamed) == {0: "one0", 1: "one1", 2: "two0", 3: "two1"}


async def test_best_of_returns_the_most_probable_samples_best_first(api: HttpApi) -> None:
    by_seed(api, "hello", "the world", "fish", "swim")
    body = (await api.complete(n=2, best_of=4, seed=0)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "swim"), (1, "fish")]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    body = (await api.complete(best_of=3, seed=0, logprobs=1)).json()
    assert [choice["text"] for choice in body["choices"]] == ["fish"]
    assert set(body["choices"][0]["logprobs"]["token_logprobs"]) == {-7.0}


async def test_beams_come_as_choices(api: HttpApi) -> None:
    by_seed(api, "hello", "the world")
    for response in (
        await api.complete(n=2, best_of=4, seed=0, use_beam_search=True, temperature=0, length_penalty=0.0),
        await api.chat(n=2, best_of=4, seed=0, use_beam_search=True),
    ):
        assert len(response.json()["choices"]) == 2
    request = api.engine.requests[0]
    assert (request.n, request.beam) == (2, BeamParameters(4, 0.0))
