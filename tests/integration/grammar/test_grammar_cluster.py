"""Structured answers of a whole cluster: drafts, forced tokens, batches and replays change no token of them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from cluster.coordinator.drafting.elsewhere import DraftsElsewhere
from cluster.core.config.sections import Configuration
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.request import SamplingParameters
from cluster.generation.text.tokenizer import Tokenizer
from cluster.wire.codec.common import encode_sampling
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.deadline import deadline
from tests.support.models import drafting_modules, tiny, tiny_tokenizer

pytestmark = pytest.mark.slow

SECONDS = 120.0
"""Far above the duration of any test on a busy machine."""
PHRASE = [40, 41, 42, 43, 44, 45, 46]
PROMPT = [50, *PHRASE, 60, *PHRASE]
SCHEMA = {
    "type": "object",
    "properties": {
        "species": {"enum": ["pilot fish", "shark", "the world"]},
        "lengths": {"type": "array", "items": {"type": "integer", "maximum": 99}, "minItems": 1, "maxItems": 3},
        "is_hello": {"type": "boolean"},
    },
    "required": ["species", "lengths", "is_hello"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Grammar] = {
    "schema": Grammar.of_schema(SCHEMA),
    "regex": Grammar(GrammarKind.REGEX, "(hello|fish|swim) [a-f]{8,12}[.]"),
    "choice": Grammar.of_choices(["hello world", "hello fish", "the hell"]),
}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "suffix": {"methods": ["suffix", "prediction"]},
    "model": {"method": "model", "model": {"device": "cpu", "compile": "off", "kv": {"pool_bytes": 1 << 20}}},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny.save(tmp_path_factory.mktemp("grammar"), tiny.llama(vocab_size=320, max_position_embeddings=1024))
    return tiny_tokenizer.byte_level(directory)


def configuration(directory: Path, draft: dict[str, Any], **target: Any) -> Configuration:
    draft = {**draft, "controller": "off", "timeout_seconds": 10.0}
    if "model" in draft:
        draft["model"] = {**draft["model"], "path": str(directory)}
    if draft.get("method") == "none":
        draft = {"method": "none"}
    kv = {"pool_bytes": 1 << 20, "block_size": 4}
    return tiny_cluster(directory, draft, target=target, kv=kv, scheduler={"max_step_tokens": 64})


async def answer(
    client: GenerationClient, grammar: Grammar, sampling: SamplingParameters, drafts: bool, *received: int, n: int = 1
) -> tuple[list[list[int]], list[generation_pb2.GenerationFinished]]:
    """The tokens of the answers, after those that the caller has of the first, and their ends."""
    message = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=PROMPT),
        sampling=encode_sampling(replace(sampling, grammar=grammar)),
        stopping=generation_pb2.StoppingCriteria(max_tokens=120),
        max_draft_tokens=None if drafts else 0,
        n=n,
    )
    if received:
        message.resume.add(index=0, token_count=len(received), token_ids=received)
    tokens: list[list[int]] = [[] for _ in range(n)]
    ends = [generation_pb2.GenerationFinished()] * n
    async for response in client.generate(message, SECONDS):
        if response.HasField("delta"):
            tokens[response.index].extend(response.delta.token_ids)
        if response.HasField("finished"):
            ends[response.index] = response.finished
    return tokens, ends


def check(grammar: Grammar, text: str) -> None:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        jsonschema.validate(json.loads(text), json.loads(grammar.text))
    elif grammar.kind is GrammarKind.REGEX:
        assert re.fullmatch(grammar.text, text)
    else:
        assert text in grammar.choices


SAMPLINGS = [
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.9, seed=5),
    SamplingParameters(temperature=1.1, seed=6, top_p=0.9, logprobs=2),
]


@pytest.mark.parametrize("draft", sorted(DRAFTS))
async def test_drafts_forced_tokens_and_batches_change_no_token(directory: Path, draft: str) -> None:
    tokenizer = Tokenizer.load(directory)
    async with deadline(SECONDS), LocalCluster(configuration(directory, DRAFTS[draft])) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        cases = [(grammar, sampling) for grammar in GRAMMARS.values() for sampling in SAMPLINGS]
        alone = [await answer(client, *case, drafts=False) for case in cases]
        together = await asyncio.gather(*(answer(client, *case, drafts=True) for case in cases))
        accepted = finished = 0
        for (grammar, _), (plain, plain_ends), (drafted, ends) in zip(cases, alone, together, strict=True):
            assert drafted == plain
            assert plain_ends[0].usage.target_steps == len(plain[0])
            if ends[0].reason == generation_pb2.FINISH_REASON_STOP:
                finished += 1
                check(grammar, tokenizer.decode(drafted[0][:-1]))
            accepted += ends[0].usage.accepted_draft_tokens
        assert finished > len(cases) // 2
        assert accepted > len(cases)
        schema, sampling = GRAMMARS["schema"], SAMPLINGS[1]
        whole = (await answer(client, schema, sampling, drafts=True))[0][0]
        for count in (1, 5, len(whole) - 1):
            rest, _ = await answer(client, schema, sampling, True, *whole[:count])
            assert rest[0] == whole[count:]
        several, _ = await answer(client, schema, sampling, drafts=True, n=3)
        single, _ = await answer(client, schema, SamplingParameters(temperature=0.9, seed=6), drafts=False)
        assert several[:2] == [whole, single[0]]
        await client.close()


async def test_a_drafter_elsewhere_drafts_what_the_grammar_allows(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random heads know nothing of the text, so that what they are told of the grammar is all that they have."""
    drafting_modules.save(directory, tmp_path / "heads", "heads")
    draft = {"method": "heads", "heads": {"path": str(tmp_path / "heads")}, "max_nodes": 8}
    sampling = SamplingParameters(temperature=0.9, seed=5)
    found: dict[str, tuple[list[int], int]] = {}
    for name, place in (("plain", "target"), ("beside", "target"), ("told", "drafter"), ("untold", "drafter")):
        if name == "untold":
            monkeypatch.setattr(DraftsElsewhere, "wants_following", False)
        async with (
            deadline(SECONDS),
            LocalCluster(configuration(directory, {**draft, "placement": place})) as cluster,
        ):
            client = GenerationClient(fixed_address(cluster.grpc_address))
            (tokens,), (end,) = await answer(client, GRAMMARS["schema"], sampling, drafts=name != "plain")
            by_module = end.usage.accepted_by_origin.trained
            found[name] = tokens, by_module
            await client.close()
    assert len({tuple(tokens) for tokens, _ in found.values()}) == 1
    assert found["told"][1] >= found["beside"][1] > 0
    assert found["told"][1] > found["untold"][1]


async def test_tokens_outside_the_grammar_cannot_be_resumed(directory: Path) -> None:
    async with deadline(SECONDS), LocalCluster(configuration(directory, DRAFTS["none"])) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        with pytest.raises(Exception, match="does not match the grammar"):
            await answer(client, GRAMMARS["schema"], SAMPLINGS[0], True, 90, 91)
        assert (await answer(client, GRAMMARS["choice"], SAMPLINGS[0], drafts=True))[0][0]
        await client.close()


class Reef(BaseModel):
    """What the `openai` client parses an answer to."""

    species: Literal["pilot fish", "shark"]
    depth: Literal[1, 2, 3]
    is_deep: bool


@pytest_asyncio.fixture
async def http(directory: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        deadline(SECONDS),
        LocalCluster(configuration(directory, DRAFTS["ngram"]), http=True) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client,
    ):
        yield client


async def test_the_openai_client_parses_answers_and_gets_required_calls(http: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    parsed = await http.chat.completions.parse(model="tiny", messages=messages, response_format=Reef, seed=3)
    reef = parsed.choices[0].message.parsed
    assert isinstance(reef, Reef)
    response = await http.responses.parse(model="tiny", input="hi", text_format=Reef)
    assert isinstance(response.output_parsed, Reef)
    tool: Any = {"type": "function", "function": {"name": "swim", "parameters": Reef.model_json_schema()}}
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "swim"}}]
    for choice in choices:
        answer = await http.chat.completions.create(
            model="tiny", messages=messages, tools=[tool], tool_choice=choice, parallel_tool_calls=False, seed=3
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function" and call.function.name == "swim"
        Reef.model_validate_json(call.function.arguments)
    with pytest.raises(openai.BadRequestError) as caught:
        await http.completions.create(model="tiny", prompt="a", extra_body={"structured_outputs": {"regex": "[a"}})
    assert caught.value.param == "structured_outputs.regex"
