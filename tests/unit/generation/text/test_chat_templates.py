"""Templates in the style of each family render as `transformers` renders them, and their calls are read back."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.core.answer_format import AnswerFormat
from cluster.core.errors import InvalidRequest
from cluster.generation.text.chat_messages import CalledTool, Message
from cluster.generation.text.chat_template import ChatTemplate, TemplateOptions
from cluster.generation.text.tokenizer import Tokenizer
from cluster.ingress.openai.parsing.answer_parser import AnswerParser
from cluster.ingress.openai.parsing.call_reader import CallOptions
from tests.support.chat_templates import CALLS, STYLES, template
from tests.support.models.tiny_tokenizer import byte_level

PLACE = {"type": "object", "properties": {"to": {"type": "string"}, "depth": {"type": "integer"}}}
TOOLS = tuple(
    json.dumps({"type": "function", "function": {"name": name, "description": "Zürich <b>", "parameters": schema}})
    for name, schema in {"swim": PLACE, "rest": {}}.items()
)
CALLED = (CalledTool("abcdefgh1", "swim", '{"to": "reef <b>", "depth": 3}'), CalledTool("abcdefgh2", "rest", "{}"))
USER = Message("user", "Where to?")
ANSWER = Message("assistant", "There.", reasoning="A reef?")
CALLER = Message("assistant", "", tool_calls=CALLED)
RESULT = Message("tool", "done", tool_call_id="abcdefgh1")
TURNS = [Message("system", "Be brief."), USER, ANSWER, USER, CALLER, RESULT, USER]


def as_variables(message: Message, *, as_parts: bool = False) -> dict[str, Any]:
    """A message as vLLM hands it to `transformers`."""
    parts = [{"type": "text", "text": text} for text in message.parts or (message.content,)]
    found: dict[str, Any] = {"role": message.role, "content": parts if as_parts else message.content}
    if message.reasoning is not None:
        found["reasoning_content"] = found["reasoning"] = message.reasoning
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


def expected(source: str, messages: list[Message], *, as_parts: bool = False, **options: Any) -> str:
    """What the renderer of `transformers` makes of a conversation."""
    turns = [as_variables(message, as_parts=as_parts) for message in messages]
    tools = [json.loads(tool) for tool in TOOLS]
    options = {"add_generation_prompt": True, **options}
    (text,), _ = render_jinja_template([turns], tools=tools, chat_template=source, bos_token="<s>", **options)
    return str(text)


def rendered(source: str, messages: list[Message], **options: Any) -> str:
    return compiled(source).render(messages, TemplateOptions(tools=TOOLS, **options))


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"})


@pytest.mark.parametrize("name", CALLS)
def test_each_family_renders_as_transformers_does_and_its_calls_are_read_back(name: str) -> None:
    for style in STYLES:
        source = template(CALLS[name], style)
        own = compiled(source)
        assert own.call_format.name == name
        turns = TURNS
        if name == "kimi_k2":  # its ids have the names of the tools
            calls = tuple(
                CalledTool(f"functions.{call.name}:{number}", call.name, call.arguments)
                for number, call in enumerate(CALLED)
            )
            turns = [*TURNS[:4], Message("assistant", "", tool_calls=calls), Message("tool", "done", tool_call_id=calls[0].id), USER]  # fmt: skip  # noqa: E501
        assert rendered(source, TURNS) == expected(source, turns)
        before, after = rendered(source, TURNS[:4]), rendered(source, TURNS[:5], add_generation_prompt=False)
        assert after.startswith(before)
        opening, closing = after.removeprefix(before), STYLES[style][1].replace("ROLE", "assistant")
        answer = opening.removesuffix(closing.replace("{{ '\n' }}", "\n"))
        schemas = {"swim": PLACE, "rest": {}}
        message = AnswerParser("c", AnswerFormat(own.call_format, own.reasoning_format), CallOptions(schemas)).message(
            answer
        )
        called = [call["function"] for call in message["tool_calls"]]
        assert not message["content"]
        assert [(one["name"], json.loads(one["arguments"])) for one in called] == [
            ("swim", {"to": "reef <b>", "depth": 3}),
            ("rest", {}),
        ]


@pytest.mark.parametrize("parts", ["text", "list", "either"])
def test_contents_in_parts_arrive_as_the_templates_code_reads_them(parts: str) -> None:
    source = template(CALLS["hermes"], parts=parts)
    turns = [Message("user", "a\nb", parts=("a", "b")), ANSWER, USER]
    assert rendered(source, turns) == expected(source, turns, as_parts=parts != "text")
    continued = [USER, Message("assistant", "On\nmy", parts=("On", "my"))]
    wanted = expected(
        source, continued, as_parts=parts != "text", continue_final_message=True, add_generation_prompt=False
    )
    assert rendered(source, continued, continue_final_message=True, add_generation_prompt=False) == wanted


def test_the_developer_is_the_system_of_a_template_that_knows_none() -> None:
    turns = [Message("system", "Be brief."), Message("developer", "Be kind."), USER]
    source = template(CALLS["hermes"])
    assert rendered(source, turns) == expected(source, [Message("system", "Be brief.\n\nBe kind."), USER])
    assert rendered(source, turns[1:]) == expected(source, [Message("system", "Be kind."), USER])
    source = template(CALLS["hermes"], knows_developer=True)
    assert rendered(source, turns) == expected(source, turns)


def test_calls_have_ids_that_the_template_takes() -> None:
    source = template(CALLS["mistral"]).replace(
        "{{ message.content }}",
        "{{ message.content }}{%- if message.role == 'tool' %}({{ message.tool_call_id }}){%- endif %}"
        "{%- for call in message.tool_calls or [] %}{%- if call.id | length != 9 %}{{ raise_exception('id') }}"
        "{%- endif %}({{ call.id }}){%- endfor %}",
    )
    calls = tuple(CalledTool(name, "rest", "{}") for name in ("call_17", "", "abcdefgh1"))
    results = [Message("tool", "x", tool_call_id=name) for name in ("call_17", None, "abcdefgh1")]
    text = rendered(source, [USER, Message("assistant", "", tool_calls=calls), *results])
    ids = [part.split(")")[0] for part in text.split("(")[1:]]
    assert ids[:3] == ids[3:]
    assert len(set(ids)) == 3 and "abcdefgh1" in ids and all(len(one) == 9 and one.isalnum() for one in ids)
    kimi = rendered(template(CALLS["kimi_k2"]), [USER, Message("assistant", "", tool_calls=calls)])
    assert "functions.rest:0" in kimi and "functions.rest:2" in kimi


HISTORY = "{{ tools | length }}{%- for message in messages %}{%- set content = message['content'] %}"
EACH = "{%- for call in message['tool_calls'] %}"


@pytest.mark.parametrize(
    "call",
    [
        "{{ '<function=' + call['function']['name'] + '>' + call['function']['arguments'] }}",
        "{{ '<function=' ~ call.function.name ~ '>' ~ call.function.arguments }}",
        "{%- set written = call.function.arguments %}<function={{ call.function.name }}>{{ written }}",
    ],
)
def test_a_template_that_writes_arguments_as_they_are_gets_their_text(call: str) -> None:
    """The templates of DeepSeek and functionary fail with an object, or write it as text that is no JSON."""
    source = HISTORY + "{{ content }}" + EACH + call + "{%- endfor %}{%- endfor %}"
    shown = '<function=swim>{"to": "reef <b>", "depth": 3}<function=rest>{}'
    assert rendered(source, [USER, CALLER]) == f"2Where to?{shown}"


@pytest.mark.parametrize("test", ["call.function.arguments is string", "call.function.arguments is mapping"])
def test_a_template_that_asks_what_arguments_are_gets_an_object(test: str) -> None:
    written = "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}"
    if "mapping" in test:
        written = "{{ call.function.arguments | tojson }}{% else %}{{ call.function.arguments }}"
    source = HISTORY + EACH + f"{{% if {test} %}}{written}{{% endif %}}" + "{%- endfor %}{%- endfor %}"
    assert rendered(source, [USER, CALLER]) == expected(source, [USER, CALLER])


def test_a_message_of_calls_alone_has_no_content_where_the_template_asks() -> None:
    """The template of DeepSeek-R1 shows either the content of a message or its calls."""
    shows_either = (
        "{%- if content is none %}" + EACH + "<{{ call.function.name }}>{%- endfor %}"
        "{%- else %}({{ content + ')' }}{%- endif %}{%- endfor %}"
    )
    assert rendered(HISTORY + shows_either, [USER, CALLER, RESULT]) == "2(Where to?)<swim><rest>(done)"
    spoken = Message("assistant", "Yes.", tool_calls=CALLED)
    assert rendered(HISTORY + shows_either, [USER, spoken]) == "2(Where to?)(Yes.)"
    needs_text = (
        "{%- if message.role == 'user' and content is none %}{{ raise_exception('empty') }}{%- endif %}"
        "{{ content.strip() }}{%- endfor %}"
    )
    assert rendered(HISTORY + needs_text, [USER, CALLER, RESULT]) == "2Where to?done"


def test_tools_are_offered_to_the_user_where_the_template_refuses_a_system() -> None:
    source = (
        "{%- for message in messages %}{%- if message.role == 'system' %}{{ raise_exception('no system') }}{%- endif %}"
        "{{ message.role }}: {{ message.content }}{{ '\n' }}{%- endfor %}"
    )
    text = rendered(source, [USER])
    assert text.startswith("user: You can call these functions:") and text.endswith("\n\nWhere to?\n")
    with pytest.raises(InvalidRequest, match="no system"):
        rendered(source, [Message("system", "Be brief."), USER])


ALTERNATING = (
    "{%- for message in messages if message.role != 'system' %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{%- endif %}"
    "[{{ message.role }}: {{ message.content | trim }}]{%- endfor %}"
)
SILENT = "{%- for message in messages if message.role in ['user', 'assistant'] %}[{{ message.role }}: {{ message.content }}]{%- endfor %}"  # noqa: E501


@pytest.mark.parametrize("source", [ALTERNATING, SILENT])
@pytest.mark.parametrize("parts", [(), ("do", "ne")])
def test_results_of_tools_are_shown_by_a_template_that_knows_none(source: str, parts: tuple[str, ...]) -> None:
    """The template of Gemma 3 takes turns of the user and the model alone."""
    result = Message("tool", "\n".join(parts) or "done", tool_call_id="a", parts=parts)
    shown = f"<tool_response>\n{result.content}\n</tool_response>"
    calls = '<tool_call>{"name": "swim", "arguments": {"to": "reef <b>", "depth": 3}}</tool_call>\n'
    calls += '<tool_call>{"name": "rest", "arguments": {}}</tool_call>'
    text = rendered(source, [USER, CALLER, result, RESULT, USER, ANSWER, USER])
    second = "<tool_response>\ndone\n</tool_response>"
    assert text.endswith(
        f"Where to?][assistant: {calls}][user: {shown}\n{second}\nWhere to?][assistant: There.][user: Where to?]"
    )
    without_offer = compiled(source).render([USER, CALLER, result])
    assert without_offer == f"[user: Where to?][assistant: {calls}][user: {shown}]"


def test_results_of_tools_keep_their_role_where_the_template_shows_it() -> None:
    source = "{%- for message in messages %}[{{ message.role }}: {{ message.content }}]{%- endfor %}"
    assert rendered(source, [USER, CALLER, RESULT]).endswith("[tool: done]")


def test_results_of_tools_are_shown_also_if_the_rest_of_the_prompt_has_the_same_text() -> None:
    result = replace(RESULT, content="5")
    text = compiled(SILENT).render([Message("user", "15 fish?"), CALLER, result])
    assert text.endswith("[user: <tool_response>\n5\n</tool_response>]")


def test_results_of_tools_keep_their_role_where_the_template_writes_them_as_json() -> None:
    source = "{%- for message in messages %}[{{ message.role }}: {{ message.content | tojson }}]{%- endfor %}"
    result = replace(RESULT, content='a "reef"\n')
    assert rendered(source, [USER, CALLER, result]).endswith('[tool: "a \\"reef\\"\\n"]')


def test_templates_are_read_by_name_from_all_files_that_may_have_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}[TOOL_CALLS]"}]
    directory = byte_level(tmp_path, chat_template=named)
    tools = TemplateOptions(tools=TOOLS)

    def texts() -> tuple[str, str]:
        tokenizer = Tokenizer.load(directory)
        return tokenizer.render_chat([USER]), tokenizer.render_chat([USER], tools)

    assert texts()[0] == "plain" and texts()[1].endswith("[TOOL_CALLS]")
    assert Tokenizer.load(directory).call_format.name == "mistral_v3"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    assert texts() == ("plain", "2 tools")
    (directory / "chat_template.jinja").write_text("own")
    assert texts() == ("own", "2 tools")
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (directory / name).unlink()
    byte_level(tmp_path, chat_template=None)
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert texts()[0] == "of the processor"
