"""The requests that `vllm bench serve` sends, field by field, without vLLM: it does not install in minutes.

They are those of its backends `openai` and `openai-chat`, and its discovery of the model when `--model` is left out.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from checks import arguments, check, require, run

URL, _, MODEL = arguments()
TOKENS = 12


def post(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream. Its last one must be `[DONE]`."""
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "x-request-id": "bench-0"}
    with urllib.request.urlopen(urllib.request.Request(URL + path, content, headers), timeout=300.0) as response:
        text = response.read().decode()
    events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    require(events[-1] == "[DONE]", events[-1])
    return [json.loads(event) for event in events[:-1]]


@check("/v1/models names the model, as --model left out needs it")
def discovery() -> str:
    with urllib.request.urlopen(f"{URL}/v1/models", timeout=60.0) as response:
        card = json.load(response)["data"][0]
    require(card["id"] == MODEL and card["root"] and card["max_model_len"] > 0, card)
    return f"root {card['root']}, max_model_len {card['max_model_len']}"


@check("backend openai: completions, ignore_eos, usage")
def completions() -> str:
    body = {
        "model": MODEL,
        "prompt": "One, two, three,",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": TOKENS,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    events = post("/v1/completions", body)
    require(any(event["choices"] and event["choices"][0]["text"] for event in events), events[:2])
    require(events[-1]["usage"]["completion_tokens"] == TOKENS, events[-1])
    return f"{len(events)} events, {events[-1]['usage']['prompt_tokens']} + {TOKENS} tokens"


@check("backend openai-chat: content parts, max_completion_tokens, usage")
def chat() -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Name three rivers."}]}],
        "max_completion_tokens": TOKENS,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    events = post("/v1/chat/completions", body)
    require(events[-1]["usage"]["completion_tokens"] == TOKENS, events[-1])
    return f"{len(events)} events"


@check("--dataset-name random: a prompt of token ids")
def token_ids() -> str:
    body = {"model": MODEL, "prompt": list(range(100, 164)), "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    events = post("/v1/completions", body | {"stream_options": {"include_usage": True}, "temperature": 0.0})
    require(events[-1]["usage"]["prompt_tokens"] == 64, events[-1])
    return "64 tokens of prompt"


if __name__ == "__main__":
    run()
