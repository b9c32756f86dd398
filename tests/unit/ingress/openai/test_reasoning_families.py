"""Every format of reasoning in every API: its budget, its count, its items, and how a client leaves it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.answer_format import ReasoningFormat
from cluster.core.answer_format_rows import REASONING_FORMATS
from cluster.core.config.sections import LimitsSection
from cluster.core.request import ThinkingBudget
from cluster.generation.text.tokenizer import Parsers, Tokenizer
from tests.support.fakes.http_app import HI, HttpApi
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE, byte_level

pytestmark = pytest.mark.slow

EFFORT = "{{ reasoning_effort }}/{{ enable_thinking }}/{{ thinking }};"


class Family(HttpApi):
    """The HTTP API over a scripted engine of one format. `is_begun`: its prompts end within reasoning."""

    def __init__(self, directory: Path, form: ReasoningFormat, *, is_begun: bool) -> None:
        ending = json.dumps(form.written_opening) if is_begun and not form.begins_inside else "''"
        template = EFFORT + CHAT_TEMPLATE + "{{ " + ending + " }}"
        tokenizer = Tokenizer.load(byte_level(directory, chat_template=template), Parsers(reasoning_parser=form.name))
        opening = "" if is_begun or form.begins_inside else form.written_opening
        self.thought = f"{opening}hm{form.closing}"
        text = f"{self.thought}{form.after_closing}{form.answer_opening}hello"
        super().__init__(directory, text, LimitsSection(), tokenizer)
        self.engine.context = 2048

    async def post(self, path: str, **values: Any) -> Any:
        response = await self.http.post(path, json=values)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, **values: Any) -> Any:
        return await self.post("/v1/chat/completions", messages=HI, max_tokens=256, **values)

    async def events(self, path: str, **values: Any) -> list[Any]:
        response = await self.http.post(path, json={**values, "stream": True})
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]


FORMS = [form for form in REASONING_FORMATS if form.reasons]


@pytest.fixture(params=[False, True], ids=["written", "begun"])
def is_begun(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=FORMS, ids=[form.name for form in FORMS])
def form(request: pytest.FixtureRequest) -> ReasoningFormat:
    found: ReasoningFormat = request.param
    return found


@pytest.fixture
def family(form: ReasoningFormat, is_begun: bool, tmp_path: Path) -> Family:
    return Family(tmp_path, form, is_begun=is_begun)


async def test_a_chat_separates_counts_bounds_and_leaves_out_reasoning(
    family: Family, form: ReasoningFormat, is_begun: bool
) -> None:
    answer = await family.chat(thinking_token_budget=7)
    message, tokens = answer["choices"][0]["message"], family.tokenizer.encode_answer
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("hm", "hm", "hello")
    start = () if is_begun or form.begins_inside else tokens(form.written_opening)
    assert family.engine.requests[-1].sampling.thinking == ThinkingBudget(7, start, tokens(form.closing))
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens(family.thought))
    hidden = (await family.chat(include_reasoning=False))["choices"][0]["message"]
    assert (hidden["reasoning_content"], hidden["reasoning"], hidden["content"]) == (None, None, "hello")
    deltas = [event["choices"][0]["delta"] for event in await family.events("/v1/chat/completions", messages=HI)]
    for name, text in {"reasoning_content": "hm", "reasoning": "hm", "content": "hello"}.items():
        assert "".join(delta.get(name) or "" for delta in deltas) == text


async def test_responses_and_messages_carry_reasoning(family: Family) -> None:
    response = await family.post("/v1/responses", input="hi")
    assert [(item["type"], item["content"][0]["text"]) for item in response["output"]] == [
        ("reasoning", "hm"),
        ("message", "hello"),
    ]
    events = await family.events("/v1/responses", input="hi")
    thought = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    said = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert ("".join(thought), "".join(said)) == ("hm", "hello")
    budget = {"type": "enabled", "budget_tokens": 9}
    message = await family.post("/v1/messages", messages=HI, max_tokens=256, thinking=budget)
    assert [block.get("thinking") or block.get("text") for block in message["content"]] == ["hm", "hello"]
    seen = family.engine.requests[-1].sampling.thinking
    assert seen is not None and seen.max_tokens == 9
    deltas = [one.get("delta", {}) for one in await family.events("/v1/messages", messages=HI, max_tokens=256)]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm"
    assert "".join(delta.get("text", "") for delta in deltas) == "hello"


@pytest.mark.parametrize("form", [FORMS[0]], ids=["any"], indirect=False)
async def test_the_effort_reaches_the_template_from_every_api(form: ReasoningFormat, tmp_path: Path) -> None:
    family = Family(tmp_path, form, is_begun=False)

    def seen() -> str:
        return family.tokenizer.decode(family.engine.requests[-1].prompt).partition(";")[0]

    await family.chat(reasoning_effort="high")
    assert seen() == "high/True/True"
    await family.chat(reasoning_effort="none")
    assert seen() == "none/False/False"
    await family.post("/v1/responses", input="hi", reasoning={"effort": "low"})
    assert seen() == "low/True/True"
    await family.post("/v1/messages", messages=HI, max_tokens=256, output_config={"effort": "high"})
    assert seen().startswith("high/")
    await family.post("/v1/messages", messages=HI, max_tokens=256, thinking={"type": "disabled"})
    assert seen() == "/False/False"
