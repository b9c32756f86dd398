"""How a model writes calls and reasoning is seen in its chat template, or set; its special tokens stay in the text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from cluster.core.config.load import load
from cluster.core.config.sections import LimitsSection
from cluster.core.errors import ConfigurationError
from cluster.generation.text.chat_template import ChatTemplate
from cluster.generation.text.tokenizer import BY_TEMPLATE, Parsers, Tokenizer
from tests.support.fakes.http_app import HI, HttpApi
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE, byte_level

TOOL = {"type": "function", "function": {"name": "swim", "parameters": {"type": "object"}}}
MARKERS = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|other|>")
TEMPLATE = CHAT_TEMPLATE + "{{ tools }}{# [TOOL_CALLS] [ARGS] [THINK] [/THINK] #}"


class MarkingModel(HttpApi):
    """The HTTP API over a scripted engine whose model marks calls and reasoning with special tokens."""

    def __init__(self, directory: Path, text: str, parsers: Parsers = BY_TEMPLATE) -> None:
        byte_level(directory, chat_template=TEMPLATE)
        vocabulary = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        vocabulary.add_special_tokens([*MARKERS])
        vocabulary.save(str(directory / "tokenizer.json"))
        super().__init__(directory, text, LimitsSection(), Tokenizer.load(directory, parsers))
        self.engine.context = 4096

    async def chat(self, **values: Any) -> Any:
        response = await self.http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 64, **values})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]


TEXT = '[THINK]hm[/THINK]<|other|>ok[TOOL_CALLS]swim[ARGS]{"to": "x"}'


async def test_an_item_of_a_response_begins_without_the_text_that_follows(tmp_path: Path) -> None:
    """A client that adds what follows to what an item began with has what the item ends with."""
    model = MarkingModel(tmp_path, TEXT)
    tool = {"type": "function", **TOOL["function"]}
    response = await model.http.post("/v1/responses", json={"input": "hi", "stream": True, "tools": [tool]})
    events = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: ")]
    begun: dict[int, Any] = {}
    kinds = set()
    for event in events:
        at = event.get("output_index")
        if event["type"] == "response.output_item.added":
            item = event["item"]
            kinds.add(item["type"])
            begun[at] = "".join(part["text"] for part in item.get("content", [])) + item.get("arguments", "")
        elif event["type"].endswith(".delta"):
            begun[at] += event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            whole = "".join(part["text"] for part in item.get("content", [])) + item.get("arguments", "")
            assert begun[at] == whole != ""
    assert kinds == {"reasoning", "message", "function_call"}


async def test_special_tokens_that_mark_calls_and_reasoning_are_found_and_others_are_left_out(tmp_path: Path) -> None:
    model = MarkingModel(tmp_path, TEXT)
    choice = await model.chat(tools=[TOOL])
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "ok")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "swim", "arguments": '{"to": "x"}'}
    assert choice["finish_reason"] == "tool_calls"
    without = (await model.chat())["message"]
    assert (without["reasoning_content"], without["content"]) == ("hm", 'okswim{"to": "x"}')


async def test_a_call_within_a_thought_stands_between_two_items_of_a_response(tmp_path: Path) -> None:
    model = MarkingModel(tmp_path, '[THINK]hm[TOOL_CALLS]swim[ARGS]{"to": "x"}so[/THINK]ok')
    function = {"type": "function", "name": "swim", "parameters": {"type": "object"}}
    response = await model.http.post("/v1/responses", json={"input": "hi", "tools": [function]})
    output = response.json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "function_call", "reasoning", "message"]
    assert [item["content"][0]["text"] for item in output if "content" in item] == ["hm", "so", "ok"]
    assert len({item["id"] for item in output}) == 4


async def test_a_required_call_is_demanded_with_the_models_special_tokens(tmp_path: Path) -> None:
    model = MarkingModel(tmp_path, TEXT)
    await model.chat(tools=[TOOL], tool_choice="required")
    grammar = model.engine.requests[-1].sampling.grammar
    assert grammar is not None
    for marker in MARKERS[:4]:
        (token,) = model.tokenizer.encode_answer(marker)
        assert (f"<[{token}]>" in grammar.text, marker in grammar.text) == (True, False)


async def test_the_formats_can_be_set(tmp_path: Path) -> None:
    model = MarkingModel(
        tmp_path, '<think>hm</think><tool_call>{"name": "swim", "arguments": {}}', Parsers("hermes", "none")
    )
    message = (await model.chat(tools=[TOOL]))["message"]
    assert message["content"] == "<think>hm</think>"
    assert message["tool_calls"][0]["function"]["name"] == "swim"
    assert message["reasoning_content"] is None


def test_unknown_formats_are_refused_by_name() -> None:
    for name in ("tool_parser", "reasoning_parser"):
        assert getattr(load({"target": {name: "mistral"}}).target, name) == "mistral"
        with pytest.raises(ConfigurationError, match=rf"{name} \(fish\) must be one of auto, .*qwen3"):
            load({"target": {name: "fish"}})


@pytest.mark.parametrize(
    ("source", "calls", "reasoning"),
    [
        ("{{ tools }}[TOOL_CALLS]", "mistral_v3", None),
        ("{{ tools }}[TOOL_CALLS][CALL_ID][ARGS]", "mistral_v11", None),
        ("<|start_header_id|>{{ tools }}<|python_tag|>", "llama3_json", None),
        ("<|im_start|>{{ tools }}<tool_call>", "hermes", None),
        ("<|im_start|>{{ tools }}<tool_call><function=name><think></think>", "qwen3_coder", "qwen3"),
        ("<|channel|>analysis{{ tools }}", "openai", "openai_gptoss"),
        ("<|im_start|>", "hermes", None),
        ("{# tools #}<|python_tag|>", "hermes", None),
        ("{{ messages }}</think><｜Assistant｜>", "hermes", "deepseek_r1"),
    ],
)
def test_the_formats_are_those_of_the_models_family(source: str, calls: str, reasoning: str | None) -> None:
    template = ChatTemplate(source, {})
    assert template.call_format.name == calls
    assert (None if template.reasoning_format is None else template.reasoning_format.name) == reasoning
