"""Anthropic's own client over `/v1/messages`: messages, streams, tools."""

from __future__ import annotations

import anthropic

from checks import MESSAGES, TOOL_QUESTION, TOOLS, arguments, check, require, run

URL, _, MODEL = arguments()
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300.0)
SMALL = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0.0}}
FUNCTION = TOOLS[0]["function"]
OWN_TOOLS = [{"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}]


@check("messages")
def messages() -> str:
    answer = CLIENT.messages.create(messages=MESSAGES, system="You are brief.", **SMALL)
    require(answer.content[0].text and answer.usage.output_tokens > 0, answer)
    return f"{answer.content[0].text[:40]!r}, stop_reason {answer.stop_reason}"


@check("messages, stream: the same text")
def stream() -> str:
    whole = CLIENT.messages.create(messages=MESSAGES, **SMALL).content[0].text
    with CLIENT.messages.stream(messages=MESSAGES, **SMALL) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    require(text == whole == final.content[0].text, (text, whole))
    return f"{final.usage.output_tokens} tokens"


@check("messages, tools and their results")
def tools() -> str:
    answer = CLIENT.messages.create(messages=TOOL_QUESTION, tools=OWN_TOOLS, **SMALL | {"max_tokens": 64})
    require(answer.content, answer)
    use = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "18 degrees"}
    turns = [*TOOL_QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    after = CLIENT.messages.create(messages=turns, tools=OWN_TOOLS, **SMALL)
    require(after.stop_reason in ("end_turn", "max_tokens", "tool_use"), after)
    return f"{answer.stop_reason}, then {after.stop_reason}"


@check("errors have their class")
def errors() -> str:
    try:
        CLIENT.messages.create(messages=MESSAGES, **SMALL | {"extra_body": {"temperature": -1.0}})
    except anthropic.BadRequestError as error:
        return type(error).__name__
    raise ValueError("no error")


if __name__ == "__main__":
    run("anthropic")
