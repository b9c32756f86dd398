"""OpenAI's own client: chats, streams, tools, structured output, responses, completions, models, errors."""

from __future__ import annotations

import json

import openai
from pydantic import BaseModel

from checks import MESSAGES, TOOL_QUESTION, TOOLS, arguments, check, require, run

URL, _, MODEL = arguments()
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300.0)
SMALL = {"model": MODEL, "max_tokens": 24, "temperature": 0.0, "seed": 1}


@check("models")
def models() -> str:
    names = [model.id for model in CLIENT.models.list()]
    require(MODEL in names, names)
    return ", ".join(names)


@check("chat")
def chat() -> str:
    answer = CLIENT.chat.completions.create(messages=MESSAGES, **SMALL)
    require(answer.choices[0].message.content and answer.usage.completion_tokens <= 24, answer)
    return repr(answer.choices[0].message.content[:40])


@check("chat, stream: the same text")
def stream() -> str:
    whole = CLIENT.chat.completions.create(messages=MESSAGES, **SMALL).choices[0].message.content
    chunks = list(
        CLIENT.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **SMALL)
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    require(text == whole, (text, whole))
    require(chunks[-1].usage.completion_tokens > 0, chunks[-1])
    return f"{len(chunks)} chunks"


@check("chat.completions.stream (helper)")
def stream_helper() -> str:
    # The helper raises an error of its own for an answer that ends by its length.
    with CLIENT.chat.completions.stream(messages=MESSAGES, stop=["."], **SMALL) as events:
        for _ in events:
            pass
        answer = events.get_final_completion()
    require(answer.choices[0].message.content, answer)
    return answer.choices[0].finish_reason


@check("logprobs")
def logprobs() -> str:
    answer = CLIENT.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=2, **SMALL)
    entries = answer.choices[0].logprobs.content
    require(len(entries) == answer.usage.completion_tokens and len(entries[0].top_logprobs) == 2, entries[:1])
    return f"{len(entries)} tokens"


@check("tools, tool_choice auto")
def tools() -> str:
    answer = CLIENT.chat.completions.create(messages=TOOL_QUESTION, tools=TOOLS, **SMALL | {"max_tokens": 64})
    message = answer.choices[0].message
    require(message.content or message.tool_calls, answer)
    calls = message.tool_calls or []
    for call in calls:
        json.loads(call.function.arguments)
    return f"{len(calls)} calls, finish_reason {answer.choices[0].finish_reason}"


@check("tools, tool_choice of one function")
def named_tool() -> str:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = CLIENT.chat.completions.create(
        messages=TOOL_QUESTION, tools=TOOLS, tool_choice=choice, **SMALL | {"max_tokens": 64}
    )
    (call,) = answer.choices[0].message.tool_calls
    require(call.function.name == "get_weather" and "city" in json.loads(call.function.arguments), call)
    return call.function.arguments


@check("tools, a message of the tool")
def tool_answer() -> str:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *TOOL_QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]
    answer = CLIENT.chat.completions.create(messages=messages, tools=TOOLS, **SMALL)
    require(answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), answer)
    return answer.choices[0].finish_reason


class Person(BaseModel):
    """A form for `.parse()`."""

    name: str
    age: int


@check("chat.completions.parse")
def parse() -> str:
    messages = [{"role": "user", "content": "Anna is 31 years old. Give her name and age as JSON."}]
    answer = CLIENT.chat.completions.parse(messages=messages, response_format=Person, **SMALL | {"max_tokens": 64})
    require(isinstance(answer.choices[0].message.parsed, Person), answer)
    return repr(answer.choices[0].message.parsed)


@check("completions, n = 2, echo with logprobs")
def completions() -> str:
    answer = CLIENT.completions.create(prompt="One, two,", n=2, logprobs=1, **SMALL)
    require([choice.index for choice in answer.choices] == [0, 1], answer)
    scored = CLIENT.completions.create(prompt="One, two,", echo=True, logprobs=1, **SMALL | {"max_tokens": 0})
    values = scored.choices[0].logprobs.token_logprobs
    require(values[0] is None and all(value <= 0 for value in values[1:]), values)
    return f"{len(values)} scored tokens"


@check("responses, stream, previous_response_id")
def responses() -> str:
    first = CLIENT.responses.create(model=MODEL, input="Name three rivers.", max_output_tokens=24, temperature=0.0)
    require(first.output_text, first)
    events = list(
        CLIENT.responses.create(
            model=MODEL, input="And one more?", previous_response_id=first.id, max_output_tokens=16, stream=True
        )
    )
    require(events[-1].type in ("response.completed", "response.incomplete"), events[-1].type)
    return f"{len(events)} events, {events[-1].type}"


@check("errors have their class")
def errors() -> str:
    seen = []
    for values in ({"temperature": -1.0}, {"model": "unknown"}):
        try:
            CLIENT.chat.completions.create(messages=MESSAGES, **SMALL | values)
        except openai.APIStatusError as error:
            seen.append(type(error).__name__)
    require(seen == ["BadRequestError", "NotFoundError"], seen)
    return ", ".join(seen)


if __name__ == "__main__":
    run("openai")
