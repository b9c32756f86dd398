"""Receipts of answers, and `POST /v1/verify`, over a whole cluster in this process."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from deploy.local.local_cluster import LocalCluster
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.fakes.http_app import chunks
from tests.support.models import tiny, tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

PHRASE = [40, 41, 42, 43, 44, 45, 46]
BODY: dict[str, Any] = {
    "prompt": [50, *PHRASE, 60, *PHRASE, 61, *PHRASE[:4]],
    "max_tokens": 24,
    "temperature": 0.7,
    "allowed_token_ids": [45, 46, 47, 48],
    "return_token_ids": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    target: Path = tiny.save(tmp_path_factory.mktemp("receipts"), tiny.llama(vocab_size=320))
    configuration = tiny_cluster(tiny_tokenizer.byte_level(target), {"method": "ngram", "controller": "off"})
    async with (
        LocalCluster(configuration, http=True) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=120) as client,
    ):
        yield client


async def answered(http: httpx.AsyncClient, **values: Any) -> list[Any]:
    response = await http.post("/v1/completions", json={**BODY, **values})
    assert response.status_code == 200, response.text
    return list(response.json()["choices"])


async def verified(http: httpx.AsyncClient, receipt: Any, **sent: Any) -> Any:
    response = await http.post("/v1/verify", json={"request": BODY, "receipt": receipt, **sent})
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_receipt_says_what_an_answer_took_and_by_whom(http: httpx.AsyncClient) -> None:
    (choice,) = await answered(http, temperature=0, logit_bias={"45": 100})  # it repeats one token
    receipt = choice["receipt"]
    assert receipt["accepted"] == choice["accepted_draft_tokens"] > 0
    assert receipt["drafted"] >= receipt["accepted"]
    assert receipt["target_passes"] == len(choice["token_ids"]) - receipt["accepted"]
    assert receipt["accepted_by_origin"] == {"request": receipt["accepted"], "earlier": 0, "trained": 0, "forced": 0}
    assert (receipt["drafter"], receipt["lossless"], receipt["resumptions"]) == ("ngram", True, 0)


async def test_a_stream_ends_with_the_same_receipt(http: httpx.AsyncClient) -> None:
    (whole,) = await answered(http, seed=5)
    *_, last = chunks(await http.post("/v1/completions", json={**BODY, "seed": 5, "stream": True}))
    assert last["choices"][0]["receipt"]["seed"] == whole["receipt"]["seed"] == 5


async def test_equal_prompts_of_one_body_have_different_answers(http: httpx.AsyncClient) -> None:
    prompts = [BODY["prompt"]] * 3
    choices = await answered(http, prompt=prompts, n=2, temperature=1.0)
    seeds = [choice["receipt"]["seed"] for choice in choices]
    assert seeds == list(range(seeds[0], seeds[0] + 6))
    assert len({choice["text"] for choice in choices}) == 6
    for choice in choices:
        (alone,) = await answered(http, temperature=1.0, seed=choice["receipt"]["seed"])
        assert alone["text"] == choice["text"]


async def test_the_chunks_of_equal_prompts_name_their_own_seeds(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={**BODY, "prompt": [BODY["prompt"]] * 2, "stream": True})
    choices = [choice for chunk in chunks(response) for choice in chunk["choices"] if choice["finish_reason"]]
    seeds = {choice["index"]: choice["receipt"]["seed"] for choice in choices}
    assert seeds[1] == seeds[0] + 1


async def test_a_seed_of_the_client_is_that_of_every_prompt(http: httpx.AsyncClient) -> None:
    choices = await answered(http, prompt=[BODY["prompt"]] * 2, n=2, seed=7)
    assert [choice["receipt"]["seed"] for choice in choices] == [7, 8, 7, 8]
    assert [choice["text"] for choice in choices[:2]] == [choice["text"] for choice in choices[2:]]


async def test_the_best_answers_have_receipts_of_their_own(http: httpx.AsyncClient) -> None:
    choices = await answered(http, n=2, best_of=6, seed=3, temperature=1.0)
    assert len({choice["receipt"]["seed"] for choice in choices}) == 2
    for choice in choices:
        (alone,) = await answered(http, temperature=1.0, seed=choice["receipt"]["seed"])
        assert alone["text"] == choice["text"]


async def test_every_answer_is_verified_by_its_receipt_alone(http: httpx.AsyncClient) -> None:
    for choice in await answered(http, n=3, seed=2**64 - 1):
        for sent in ({"text": choice["text"]}, {"token_ids": choice["token_ids"]}):
            found = await verified(http, choice["receipt"], **sent)
            assert (found["equal"], found["first_difference"]) == (True, None)
            assert found["compared_tokens"] == len(choice["token_ids"])
            assert found["same_fingerprint"] is True


async def test_the_first_token_that_differs_is_named(http: httpx.AsyncClient) -> None:
    (choice,) = await answered(http, seed=9)
    tokens = list(choice["token_ids"])
    forged = [*tokens[:7], 49, *tokens[8:]]
    found = await verified(http, choice["receipt"], token_ids=forged)
    assert found["first_difference"] == {"token": 7, "expected": tokens[7], "found": 49}
    cut = await verified(http, choice["receipt"], token_ids=tokens[:-1])
    assert cut["first_difference"] == {"token": len(tokens) - 1, "expected": tokens[-1], "found": None}
    text = choice["text"]
    other = await verified(http, choice["receipt"], text=text[:3] + "?" + text[4:])
    assert (other["equal"], other["first_difference"]["character"]) == (False, 3)
    assert other["first_difference"]["expected"].startswith(text[3])
    assert not (await verified(http, {"seed": 10}, text=text))["equal"]


@pytest.mark.parametrize("prompt", [BODY["prompt"], "so it is"])
async def test_a_text_that_begins_with_its_prompt_is_refused_and_the_answer_alone_is_verified(
    http: httpx.AsyncClient, prompt: str | list[int]
) -> None:
    body = {**BODY, "prompt": prompt, "seed": 11}
    (echoed,), (alone,) = await answered(http, **body, echo=True), await answered(http, **body)
    assert echoed["text"].endswith(alone["text"]) and echoed["text"] != alone["text"]
    sent = {"request": {**body, "echo": True}, "receipt": echoed["receipt"]}
    assert (await http.post("/v1/verify", json={**sent, "text": alone["text"]})).json()["equal"]
    assert not (await http.post("/v1/verify", json={**sent, "text": "so"})).json()["equal"]
    error = (await http.post("/v1/verify", json={**sent, "text": echoed["text"]})).json()["error"]
    assert error["param"] == "text"
    assert error["message"].endswith("is refused; it must be the text of the answer without its prompt")


async def test_an_altered_answer_may_begin_like_the_prompt(http: httpx.AsyncClient) -> None:
    body = {**BODY, "allowed_token_ids": [45], "seed": 11}
    (one,) = await answered(http, **body)
    for prompt in (one["text"][0], [319]):  # an id without a piece has no text
        repeated = {**body, "prompt": prompt}
        (alone,) = await answered(http, **repeated)
        text = alone["text"]
        sent = {"request": {**repeated, "echo": True}, "receipt": alone["receipt"]}
        assert text == one["text"]
        for altered in (text[:3] + "?" + text[4:], text[:-1], text[0], text[0] + "?"):
            response = await http.post("/v1/verify", json={**sent, "text": altered})
            assert response.json().get("equal") is False, (prompt, altered, response.text)
        assert (await http.post("/v1/verify", json={**sent, "text": text})).json()["equal"]
        if prompt == text[0]:
            assert (await http.post("/v1/verify", json={**sent, "text": prompt + text})).status_code == 400


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"request": BODY, "receipt": {"seed": 1}}, "text"),
        ({"request": BODY, "receipt": {"seed": 1}, "text": "a", "token_ids": [1]}, "text"),
        ({"request": BODY, "receipt": {}, "text": "a"}, "receipt.seed"),
        ({"request": {**BODY, "prompt": ["a", "b"]}, "receipt": {"seed": 1}, "text": "a"}, "request.prompt"),
        (
            {"request": {**BODY, "use_beam_search": True}, "receipt": {"seed": 1}, "text": "a"},
            "request.use_beam_search",
        ),
        ({"request": {**BODY, "hue": 1}, "receipt": {"seed": 1}, "text": "a"}, "hue"),
    ],
)
async def test_what_cannot_be_verified_is_refused_by_name(
    http: httpx.AsyncClient, body: dict[str, Any], field: str
) -> None:
    response = await http.post("/v1/verify", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


async def test_the_fingerprint_names_the_program_and_what_the_target_computes_with(http: httpx.AsyncClient) -> None:
    whole = (await http.post("/v1/completions", json=BODY)).json()
    name = whole["system_fingerprint"]
    assert re.fullmatch(r"pilotfish-[\w.]+-tp1-invariant-[0-9a-f]{12}", name)
    assert whole["choices"][0]["receipt"]["fingerprint"] == name


async def test_the_other_apis_have_receipts_too(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/responses", json={"input": "hi", "seed": 3, "max_output_tokens": 4})
    receipt = response.json()["receipt"]
    assert (receipt["seed"], receipt["lossless"], receipt["target_passes"]) == (3, True, 4 - receipt["accepted"])
    sent = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    message = (await http.post("/v1/messages", json=sent)).json()
    assert message["receipt"]["fingerprint"] == receipt["fingerprint"]
    stream = (await http.post("/v1/messages", json={**sent, "stream": True})).text
    assert '"receipt":{"seed":' in stream


async def test_a_response_says_how_well_speculation_worked_as_vllm_does(http: httpx.AsyncClient) -> None:
    body = {**BODY, "temperature": 0, "logit_bias": {"45": 100}, "n": 2}
    whole = (await http.post("/v1/completions", json=body)).json()
    found = whole["metrics"]["speculative_decoding"]
    receipts = [choice["receipt"] for choice in whole["choices"]]
    assert found["num_accepted_draft_tokens"] == sum(one["accepted"] for one in receipts) > 0
    assert found["num_draft_tokens"] == sum(one["drafted"] for one in receipts)
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"]
    assert sum(count * steps for count, steps in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]


@pytest.mark.parametrize("interval", [1, 5])
async def test_a_stream_with_usage_says_the_same(http: httpx.AsyncClient, interval: int) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}, "stream_interval": interval}
    body = {**BODY, "temperature": 0, "logit_bias": {"45": 100}, **more}
    *_, last = chunks(await http.post("/v1/completions", json=body))
    found = last["metrics"]["speculative_decoding"]
    details = last["usage"]["completion_tokens_details"]
    assert found["num_accepted_draft_tokens"] == details["accepted_prediction_tokens"] > 0


async def test_a_response_without_drafts_has_no_such_field(http: httpx.AsyncClient) -> None:
    assert "metrics" not in (await http.post("/v1/completions", json={**BODY, "max_draft_tokens": 0})).json()


async def test_bad_words_are_never_spelled_by_other_tokens(http: httpx.AsyncClient) -> None:
    """Every byte is a token, so a word can be spelled in many ways."""
    body = {"prompt": [50, 51], "max_tokens": 48, "temperature": 1.0, "seed": 5}
    free = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    words = [part for part in re.split(r"[^a-zA-Z0-9]+", free) if len(part) > 1][:8]
    assert words
    for drafts in (None, 0):
        response = await http.post("/v1/completions", json={**body, "bad_words": words, "max_draft_tokens": drafts})
        text = response.json()["choices"][0]["text"]
        assert not [word for word in words if re.search(rf"(?<![^\W_]){re.escape(word)}", text)]
