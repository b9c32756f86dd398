"""Chats are stored for distillation exactly if the API key, the request and the settings let drafts learn from them."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from cluster.core.config.draft_section import LearnsFrom
from cluster.core.errors import Overloaded
from cluster.generation.prompt_log import PromptLog
from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from pilotfish.v1 import generation_pb2
from tests.support.fakes.both_apis import OWN_KEY, BothApis, Request, serving
from tests.support.fakes.fake_engine import MODEL, fake_service
from workers.distill.prompts import read_prompts

TEACHER, OTHER = "teacher-key-0123456789", "other-key-0123456789"
KEYS = f"teacher {TEACHER} learn\nother {OTHER}"


@dataclass(frozen=True)
class Sent:
    """One request to each API: a conversation that says who sent it."""

    apis: BothApis
    key: str | None

    async def everywhere(self, text: str, **fields: Any) -> None:
        messages = [{"role": "user", "content": text}]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": messages, "max_tokens": 3},
            "/v1/responses": {"input": text, "max_output_tokens": 3},
            "/v1/messages": {"messages": messages, "max_tokens": 3, "model": MODEL},
        }
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        for path, body in bodies.items():
            response = await self.apis.http.post(path, json=body | fields, headers=headers)
            assert response.status_code == 200, (path, response.text)
        client = GenerationClient(fixed_address(self.apis.grpc_address), PublicAccess(self.key))
        asked = chat(text)
        asked.client_allows_learning = True  # no client can say so itself
        if "store" in fields:
            asked.store = fields["store"]
        async for _ in client.generate(asked, 10.0):
            pass
        await client.close()


SENT = 4
"""Requests of `Sent.everywhere`."""


def chat(text: str) -> Request:
    return Request(chat=generation_pb2.ChatInput(messages=[generation_pb2.ChatMessage(role="user", content=text)]))


def said(directory: Path) -> list[str]:
    """What users said in all stored conversations."""
    return [turn for file in directory.glob("*") for prompt in read_prompts(file) for turn in prompt.turns]


@pytest.mark.parametrize("learns_from", ["none", "all"], ids=["learning off", "learning on"])
@pytest.mark.parametrize("learn_from", ["keys", "all"])
async def test_the_key_and_the_setting_allow_it_and_a_request_forbids_it(
    tmp_path: Path, learn_from: Literal["keys", "all"], learns_from: LearnsFrom
) -> None:
    log = PromptLog(tmp_path / "log", learn_from, 1 << 20)
    log.start()
    keys = KeyRing(parse_keys(KEYS, "keys"), own_key=OWN_KEY)
    async with serving(tmp_path, keys, learns_from=learns_from, prompt_log=log) as apis:
        for key, who in ((TEACHER, "of the teacher"), (OTHER, "of another")):
            await Sent(apis, key).everywhere(who)
            await Sent(apis, key).everywhere(f"not to be stored, {who}", store=False)
    log.close()

    expected = ["of the teacher"] * SENT + ["of another"] * SENT * (learn_from == "all")
    assert said(tmp_path / "log") == expected
    text = b"".join(file.read_bytes() for file in (tmp_path / "log").iterdir())
    for name in (TEACHER, OTHER, '"teacher"', '"other"', MODEL):
        assert name.encode() not in text


@pytest.mark.parametrize(("learn_from", "count"), [("keys", 0), ("all", SENT)])
async def test_without_keys_nobody_has_allowed_it_unless_the_setting_is_for_all(
    tmp_path: Path, learn_from: Literal["keys", "all"], count: int
) -> None:
    log = PromptLog(tmp_path / "log", learn_from, 1 << 20)
    log.start()
    async with serving(tmp_path, KeyRing(), prompt_log=log) as apis:
        await Sent(apis, None).everywhere("of anybody")
    log.close()

    assert said(tmp_path / "log") == ["of anybody"] * count


async def test_a_repeated_answer_is_not_stored(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "log", "all", 1 << 20)
    log.start()
    request = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    async with serving(tmp_path, KeyRing(), prompt_log=log) as apis:
        body = {"request": request, "receipt": {"seed": 5}, "text": "x"}
        assert (await apis.http.post("/v1/verify", json=body)).status_code == 200
    log.close()

    assert said(tmp_path / "log") == []


async def test_a_request_is_stored_once_however_often_it_is_refused_or_resumed(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "log", "all", 1 << 20)
    log.start()
    service, engine, _ = fake_service(tmp_path, prompt_log=log)
    asked = chat("hi")
    asked.request_id, asked.sampling.seed = "one", 7
    engine.refusal = Overloaded("full")
    with pytest.raises(Overloaded):
        await anext(service.generate(asked))
    engine.refusal = None
    async with aclosing(service.generate(asked)) as events:
        _ = [event async for event in events]
    asked.resume.add(index=0, token_count=2)
    async with aclosing(service.generate(asked)) as events:
        _ = [event async for event in events]
    log.close()

    assert said(tmp_path / "log") == ["hi"]


async def test_the_sources_of_an_encoder_decoder_model_are_left_out(tmp_path: Path) -> None:
    log = PromptLog(tmp_path / "log", "all", 1 << 20)
    log.start()
    service, engine, _ = fake_service(tmp_path, prompt_log=log)
    engine.decoder_start, engine.max_source_len = (1,), 64
    async with aclosing(service.generate(chat("Bonjour"))) as events:
        assert [event async for event in events]
    log.close()

    assert said(tmp_path / "log") == []
