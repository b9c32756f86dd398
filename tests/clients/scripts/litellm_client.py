"""LiteLLM: completion, stream, async, tools, the reasoning field, text completion."""

from __future__ import annotations

import asyncio

import litellm

from checks import MESSAGES, TOOL_QUESTION, TOOLS, arguments, check, require, run

URL, _, MODEL = arguments()
litellm.telemetry = False
SMALL = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 24, "temperature": 0.0, "timeout": 300.0}
PROVIDERS = (f"openai/{MODEL}", f"hosted_vllm/{MODEL}")


@check("completion by both providers (openai, hosted_vllm)")
def completion() -> str:
    texts = [
        litellm.completion(model=name, messages=MESSAGES, **SMALL).choices[0].message.content for name in PROVIDERS
    ]
    require(texts[0] and texts[0] == texts[1], texts)
    return repr(texts[0][:40])


@check("completion, stream: the same text")
def stream() -> str:
    whole = litellm.completion(model=PROVIDERS[1], messages=MESSAGES, **SMALL).choices[0].message.content
    chunks = list(litellm.completion(model=PROVIDERS[1], messages=MESSAGES, stream=True, **SMALL))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    require(text == whole, (text, whole))
    return f"{len(chunks)} chunks"


@check("the reasoning field exists or is empty")
def reasoning() -> str:
    answer = litellm.completion(model=PROVIDERS[1], messages=MESSAGES, reasoning_effort="low", **SMALL)
    message = answer.choices[0].message
    require(message.content, message)
    return f"reasoning_content {getattr(message, 'reasoning_content', None)!r}"


@check("acompletion, eight at once")
def several() -> str:
    async def ask() -> list[str]:
        calls = (litellm.acompletion(model=PROVIDERS[0], messages=MESSAGES, seed=1, **SMALL) for _ in range(8))
        return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    texts = asyncio.run(ask())
    require(len(set(texts)) == 1, texts)
    return "8 equal answers"


@check("tools")
def tools() -> str:
    answer = litellm.completion(model=PROVIDERS[1], messages=TOOL_QUESTION, tools=TOOLS, **SMALL | {"max_tokens": 64})
    message = answer.choices[0].message
    require(message.content or message.tool_calls, answer)
    return f"{len(message.tool_calls or [])} calls"


@check("text_completion")
def text_completion() -> str:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="One, two,", **SMALL)
    require(answer.choices[0].text, answer)
    return repr(answer.choices[0].text[:40])


if __name__ == "__main__":
    run("litellm")
