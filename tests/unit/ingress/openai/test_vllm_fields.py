"""vLLM's parameters over HTTP, with a scripted engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import LimitsSection
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.fakes.fake_engine import CONTEXT
from tests.support.fakes.http_app import HI, HttpApi, chunks, error_of
from tests.support.models.tiny_tokenizer import byte_level

TEXT = "hello the world"


async def choice(api: HttpApi, **values: Any) -> Any:
    response = await api.complete(**values)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_the_stop_string_is_kept_if_asked(api: HttpApi) -> None:
    kept = await choice(api, stop=" wor", include_stop_str_in_output=True)
    assert (kept["text"], kept["stop_reason"]) == ("hello the wor", " wor")
    assert (await choice(api, stop=" wor"))["text"] == "hello the"


async def test_special_tokens_are_in_the_text_if_asked(api: HttpApi) -> None:
    assert (await choice(api))["text"] == TEXT
    both = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert (await choice(api, **both))["text"] == TEXT + "<|im_end|>"
    assert (await choice(api, skip_special_tokens=False))["text"] == TEXT  # the stop token is cut
    for value in (True, False):
        assert (await choice(api, spaces_between_special_tokens=value))["text"] == TEXT


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [97, 98, 99]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [5, 6, 7]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 8}, [*range(5, 100)][-(CONTEXT - 8) :]),
    ],
)
async def test_a_long_prompt_is_truncated(api: HttpApi, values: dict[str, Any], kept: list[int]) -> None:
    prompt = [*range(5, 100)]
    answer = await choice(api, prompt=prompt, return_token_ids=True, **values)
    assert answer["prompt_token_ids"] == kept
    assert [*api.engine.requests[-1].prompt] == kept
    assert error_of(await api.complete(prompt=prompt))["param"] == "prompt"


async def test_special_tokens_are_added_to_the_prompt_as_asked(tmp_path: Path) -> None:
    api = HttpApi(tmp_path, tokenizer=Tokenizer.load(byte_level(tmp_path, opens_texts=True)))
    for body in ({"prompt": "hi"}, {"messages": HI}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        for special in (True, False):
            assert (await api.post(path, **body, add_special_tokens=special)).status_code == 200
    completion, chat = api.engine.requests[:2], api.engine.requests[2:]
    expected = [api.tokenizer.encode("hi", special) for special in (True, False)]
    assert expected[0] != expected[1]
    assert [request.prompt for request in completion] == expected
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert [request.prompt for request in chat] == [api.tokenizer.encode(rendered, one) for one in (True, False)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_length_is_fitted_to_the_context_and_the_usage_says_so(api: HttpApi, stream: bool) -> None:
    prompt = [7] * (CONTEXT - 4)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for values, reduced in (({}, 4), ({"max_tokens": CONTEXT}, 4), ({"max_tokens": 4}, None)):
        response = await api.complete(prompt=prompt, **values, **options)
        usage = (chunks(response)[-1] if stream else response.json())["usage"]
        assert usage.get("max_tokens") == reduced
        assert api.engine.requests[-1].stopping.max_tokens == 4
    error = error_of(await api.complete(prompt=prompt, max_tokens=CONTEXT + 1, **options))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


LONG = "x" * CONTEXT


@pytest.mark.parametrize("repeats", [1, 1000], ids=["counted", "too long to count"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [7] * CONTEXT}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/responses", {"input": [{"role": "user", "content": LONG}], "stream": True}),
    ],
)
async def test_a_prompt_beyond_the_context_is_recognisable(
    tmp_path: Path, path: str, body: dict[str, Any], repeats: int
) -> None:
    api = HttpApi(tmp_path, limits=LimitsSection())
    sent = json.loads(json.dumps(body).replace(LONG, LONG * repeats))
    async with api.http:
        response = await api.post(path, **sent)
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    least, most = re.fullmatch(
        r"prompt is too long: (?:at least )?(\d+) tokens > (\d+) maximum: "
        rf"this model's maximum context length is {CONTEXT} tokens, for the prompt and the answer together",
        error["message"],
    ).groups()  # type: ignore[union-attr]
    assert int(least) > int(most) == CONTEXT - 1


async def test_a_negative_seed_is_the_unsigned_one_with_the_same_bits(api: HttpApi) -> None:
    assert (await api.complete(seed=-1)).json()["seed"] == 2**64 - 1
    assert api.engine.requests[0].sampling.seed == 2**64 - 1
    assert error_of(await api.complete(seed=-(2**63) - 1))["param"] == "seed"


@pytest.mark.parametrize("values", [{"temperature": 100.0}, {"repetition_penalty": 50.0}, {"presence_penalty": -2.0}])
async def test_penalties_and_temperature_have_vllms_ranges(api: HttpApi, values: dict[str, float]) -> None:
    await choice(api, **values)
    ((name, value),) = values.items()
    assert getattr(api.engine.requests[0].sampling, name) == value


async def test_exclusions_reach_the_engine(api: HttpApi) -> None:
    await choice(api, allowed_token_ids=[5, 6], bad_words=["world", " the"], logprobs=1, logprob_token_ids=[8, 9])
    sampling = api.engine.requests[0].sampling
    assert (sampling.allowed_token_ids, sampling.logprob_token_ids) == ((5, 6), (8, 9))
    assert sampling.bad_texts == ("world", " the")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids[0]"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**32 - 1}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"stream_interval": 0}, "stream_interval"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"priority": 2**31}, "priority"),
        ({"use_beam_search": True, "n": 2, "bad_words": ["a"]}, "bad_words"),
        ({"use_beam_search": True, "n": 2, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
async def test_wrong_values_are_refused_by_name(api: HttpApi, values: dict[str, Any], field: str) -> None:
    assert error_of(await api.complete(**values))["param"] == field


async def test_a_suffix_is_refused_with_the_reason(api: HttpApi) -> None:
    error = error_of(await api.complete(suffix="end"))
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert "not trained to fill in" in error["message"]


async def test_an_assistant_message_may_have_no_content(api: HttpApi) -> None:
    turns = [*HI, {"role": "assistant", "content": None}, *HI]
    assert (await api.chat(messages=turns)).status_code == 200
    assert error_of(await api.chat(messages=[{"role": "user", "content": None}]))["param"] == "messages[0].content"


async def test_tokens_are_reported_for_prompt_and_answer(api: HttpApi) -> None:
    tokens = [*api.tokenizer.encode(TEXT), 2]
    body = (await api.chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == [*api.engine.requests[0].prompt]
    assert body["choices"][0]["token_ids"] == tokens
    first, *others = chunks(await api.chat(return_token_ids=True, stream=True))
    assert first["prompt_token_ids"] == body["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in others)
    pieces = chunks(await api.complete(return_token_ids=True, stream=True))
    assert pieces[0]["choices"][0]["prompt_token_ids"] == [*api.engine.requests[-1].prompt]
    body = (await api.chat()).json()
    assert (body["prompt_token_ids"], body["prompt_logprobs"]) == (None, None)
    (choice,) = (await api.complete()).json()["choices"]
    assert (choice["prompt_token_ids"], choice["prompt_logprobs"]) == (None, None)


async def test_tokens_are_named_by_their_ids_if_asked(api: HttpApi) -> None:
    tokens = [*api.tokenizer.encode(TEXT), 2]
    names = [f"token_id:{token}" for token in tokens]
    logprobs = (await choice(api, logprobs=1, return_tokens_as_token_ids=True))["logprobs"]
    assert logprobs["tokens"] == names
    assert logprobs["top_logprobs"][0] == {names[0]: -0.5}
    body = (await api.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)).json()
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == names


async def test_chunks_have_at_least_the_interval_and_lose_nothing(api: HttpApi) -> None:
    async def streamed(**values: Any) -> list[Any]:
        return chunks(await api.complete(stream=True, return_token_ids=True, logprobs=0, **values))

    fine, coarse = await streamed(), await streamed(stream_interval=5)
    counts = [len(chunk["choices"][0].get("token_ids", ())) for chunk in coarse[:-1]]
    assert len(coarse) < len(fine)
    assert all(count >= 5 for count in counts[1:-1])
    for name in ("text", "token_ids"):
        joined = [[part for chunk in parts[:-1] for part in chunk["choices"][0][name]] for parts in (fine, coarse)]
        assert joined[0] == joined[1]
    entries = [token for chunk in coarse[:-1] for token in chunk["choices"][0]["logprobs"]["tokens"]]
    assert "".join(entries) == TEXT + "<|im_end|>"


async def test_every_chunk_has_the_usage_so_far_if_asked(api: HttpApi) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = chunks(await api.chat(stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] > counts[0] > 0
    assert {event["usage"]["prompt_tokens"] for event in events} == {last["usage"]["prompt_tokens"]}
