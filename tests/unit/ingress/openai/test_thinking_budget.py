"""`thinking_token_budget` and `thinking.budget_tokens` reach the engine with the tokens of `<think>` and `</think>`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.request import ThinkingBudget
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.fakes.fake_engine import script_of
from tests.support.fakes.http_app import HI, HttpApi, error_of
from tests.support.grammars import accepts
from tests.support.models.tiny_tokenizer import CHAT_TEMPLATE, byte_level

OPENING = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>\n{% endif %}"
SCHEMA = {"type": "json_object"}


class ThinkingModel(HttpApi):
    """The HTTP API over a scripted engine whose model thinks. `writes_start`: its prompts do not end with `<think>`."""

    def __init__(self, directory: Path, *, writes_start: bool = False, template: str = "") -> None:
        template = template or CHAT_TEMPLATE + ("{# </think> #}" if writes_start else OPENING)
        tokenizer = Tokenizer.load(byte_level(directory, chat_template=template))
        super().__init__(directory, "hm</think>hello", LimitsSection(), tokenizer)
        self.engine.context = 1024

    async def post(self, path: str = "/v1/chat/completions", **values: Any) -> httpx.Response:
        return await super().post(path, **{"messages": HI, "max_tokens": 64, **values})

    @property
    def seen(self) -> ThinkingBudget | None:
        return self.engine.requests[-1].sampling.thinking

    def tokens(self, text: str) -> tuple[int, ...]:
        return self.tokenizer.encode_answer(text)


async def test_the_budget_arrives_where_the_prompt_ends_in_thinking(tmp_path: Path) -> None:
    model = ThinkingModel(tmp_path)
    message = (await model.post(thinking_token_budget=7)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "hello")
    assert model.seen == ThinkingBudget(7, (), model.tokens("</think>"))
    assert (await model.post(thinking_token_budget=-1)).status_code == 200
    assert model.seen is None
    prompt = {"prompt": "why?<think>\n", "thinking_token_budget": 0}
    assert (await model.http.post("/v1/completions", json=prompt)).status_code == 200
    assert model.seen == ThinkingBudget(0, (), model.tokens("</think>"))


async def test_the_model_may_write_the_start_itself_or_be_told_not_to_think(tmp_path: Path) -> None:
    model = ThinkingModel(tmp_path, writes_start=True)
    await model.post(thinking_token_budget=7)
    assert model.seen == ThinkingBudget(7, model.tokens("<think>"), model.tokens("</think>"))


async def test_anthropics_budget_is_the_same(tmp_path: Path) -> None:
    model = ThinkingModel(tmp_path)
    answer = await model.post("/v1/messages", thinking={"type": "enabled", "budget_tokens": 9})
    assert [block["type"] for block in answer.json()["content"]] == ["thinking", "text"]
    assert model.seen is not None and model.seen.max_tokens == 9
    for thinking in ({"type": "adaptive"}, {"type": "disabled"}):
        assert (await model.post("/v1/messages", thinking=thinking)).status_code == 200
        assert model.seen is None


@pytest.mark.parametrize("thinking", [{"type": "deep"}, {"type": "enabled", "budget_tokens": "9"}])
async def test_wrong_thinking_is_refused_by_name(tmp_path: Path, thinking: dict[str, Any]) -> None:
    answer = await ThinkingModel(tmp_path).post("/v1/messages", thinking=thinking)
    assert answer.status_code == 400
    assert "thinking." in answer.text


async def test_a_budget_has_no_effect_on_a_model_that_does_not_think(tmp_path: Path) -> None:
    api = HttpApi(tmp_path / "plain")
    assert (await api.chat(thinking_token_budget=3)).status_code == 200
    assert api.engine.requests[-1].sampling.thinking is None
    beams = await api.chat(thinking_token_budget=3, use_beam_search=True, n=2, temperature=0)
    assert (beams.status_code, error_of(beams)["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("writes_start", [False, True])
async def test_a_model_thinks_within_its_budget_before_what_it_writes_matches_a_grammar(
    tmp_path: Path, writes_start: bool
) -> None:
    model = ThinkingModel(tmp_path, writes_start=writes_start)
    assert (await model.post(thinking_token_budget=3, response_format=SCHEMA)).status_code == 200
    assert model.seen is not None and model.seen.max_tokens == 3
    grammar = model.engine.requests[-1].sampling.grammar
    assert grammar is not None
    for text, is_right in {
        "hm</think>\n\n{}": not writes_start,
        "<think>hm</think>{}": True,  # where reasoning has begun, it may have a tag
        "{}": writes_start,
        "<think>hm": False,
        "hm</think>no": False,
    }.items():
        assert accepts(grammar, text) is is_right, text
    completion = {"prompt": "why?", "thinking_token_budget": 3, "response_format": SCHEMA}
    assert (await model.http.post("/v1/completions", json=completion)).status_code == 200
    assert model.seen is None


async def test_budgets_out_of_bounds_are_refused_by_name(tmp_path: Path) -> None:
    api = HttpApi(tmp_path)
    for value in (-2, 1 << 21, 1.5):
        refused = await api.chat(thinking_token_budget=value)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "thinking_token_budget"), value


@pytest.mark.parametrize("writes_start", [False, True])
@pytest.mark.parametrize("step", [1, 3])
async def test_the_tokens_of_what_the_model_thinks_are_counted(tmp_path: Path, writes_start: bool, step: int) -> None:
    model = ThinkingModel(tmp_path, writes_start=writes_start)
    thought = "<think>hm</think>" if writes_start else "hm</think>"
    model.engine.script, model.engine.block = script_of(model.tokenizer, thought + "hello"), step
    chat = (await model.post()).json()
    response = (await model.http.post("/v1/responses", json={"input": "hi"})).json()
    cut = (await model.post(max_tokens=2)).json()
    count = len(model.tokens(thought))
    assert chat["usage"]["completion_tokens_details"]["reasoning_tokens"] == count
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == count
    # Of a beginning of "<think>" it is not certain yet that the model thinks.
    assert cut["usage"]["completion_tokens_details"]["reasoning_tokens"] == (0 if writes_start else 2)


@pytest.mark.parametrize(
    ("content", "role", "reasoning"),
    [
        ("<think>\nI wonder", "assistant", "hm"),
        ("<think>", "assistant", "hm"),
        ("<think>so</think>yes <think>", "assistant", None),
        ("what is <think>", "user", None),
    ],
)
async def test_a_continued_message_is_thought_if_it_has_begun_so(
    tmp_path: Path, content: str, role: str, reasoning: str | None
) -> None:
    model = ThinkingModel(tmp_path)
    turns = [*HI, {"role": role, "content": content}]
    message = (await model.post(messages=turns, continue_final_message=True)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == reasoning


@pytest.mark.parametrize(("content", "reasoning"), [("Sure, ", None), ("<think>\nI wonder", "hm"), ("", "hm")])
async def test_a_model_that_begins_with_thought_continues_what_the_message_has_begun(
    tmp_path: Path, content: str, reasoning: str | None
) -> None:
    model = ThinkingModel(tmp_path, template=CHAT_TEMPLATE + "{# </think> <｜Assistant｜> #}")
    turns = [*HI, {"role": "assistant", "content": content}]
    message = (await model.post(messages=turns, continue_final_message=True)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == reasoning


THOUGHTS = (
    "{% for message in messages %}{{ message.role }}({{ message.reasoning_content }}){{ message.content }};{% endfor %}"
)


async def test_what_an_earlier_response_thought_is_shown_to_the_template(tmp_path: Path) -> None:
    model = ThinkingModel(tmp_path, template=THOUGHTS + OPENING)
    first = (await model.http.post("/v1/responses", json={"input": "hi"})).json()
    assert [item["type"] for item in first["output"]] == ["reasoning", "message"]
    again = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "so?"}]
    later: list[dict[str, Any]] = [{"input": again}, {"input": "so?", "previous_response_id": first["id"]}]
    for body in later:
        response = await model.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        prompt = model.tokenizer.decode(model.engine.requests[-1].prompt)
        assert "assistant(hm)hello;user()so?;" in prompt
