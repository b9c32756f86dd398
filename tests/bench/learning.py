"""Tokens per step over time of a draft that learns, beside a draft that does not, at one running server.

    python -m tests.bench.learning --url http://127.0.0.1:8000 --prompts A.jsonl --then B.jsonl --minutes 60

The server has `draft.learn: on` and two API keys: PILOTFISH_LEARNING_KEY with `learn` behind it, PILOTFISH_FROZEN_KEY
without. Both send the same prompts at the same rate, so that they differ in their drafts alone. Their texts are
compared token for token. At half of the time, the prompts become those of `--then`. Each minute prints a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from tests.bench.report import write
from workers.distill.prompts import read_prompts

KEYS = {"learning": "PILOTFISH_LEARNING_KEY", "frozen": "PILOTFISH_FROZEN_KEY"}


@dataclass
class Minute:
    """What one client received in a minute."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    """Time of all its requests, in seconds."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one step of the target added, on average."""
        return self.tokens / max(1, self.steps)

    def add(self, answer: dict[str, Any], seconds: float) -> None:
        """Count an answer that took so many seconds."""
        self.tokens += answer["usage"]["completion_tokens"]
        self.steps += answer["choices"][0]["receipt"]["target_passes"]
        self.seconds += seconds


async def compare(http: httpx.AsyncClient, files: Sequence[Path], options: argparse.Namespace) -> None:
    """Send the prompts of each file for the same time, and print what each minute brought."""
    begun, minute = time.monotonic(), 0
    for number, file in enumerate(files, 1):
        prompts: Iterator[str] = cycle([prompt.turns[0] for prompt in read_prompts(file) if prompt.turns])
        end = begun + 60 * options.minutes * number / len(files)
        while time.monotonic() < end:
            found, until = {name: Minute() for name in KEYS}, time.monotonic() + 60
            different = 0
            while time.monotonic() < min(until, end):
                prompt, texts = next(prompts), set()
                for name in KEYS:
                    at = time.monotonic()
                    answer = await answered(http, name, prompt, options.tokens)
                    found[name].add(answer, time.monotonic() - at)
                    texts.add(tuple(answer["choices"][0]["token_ids"]))
                different += len(texts) > 1
                await asyncio.sleep(options.pause)
            minute += 1
            rows = {f"{name}_{what}": value for name, one in found.items() for what, value in columns(one).items()}
            write(json.dumps({"minute": minute, "prompts": file.name, "different_texts": different, **rows}))


def columns(minute: Minute) -> dict[str, float]:
    """The figures of a minute."""
    speed = minute.tokens / minute.seconds if minute.seconds else 0.0
    return {"tokens_per_step": round(minute.tokens_per_step, 3), "tokens_per_second": round(speed, 2)}


async def answered(http: httpx.AsyncClient, name: str, prompt: str, tokens: int) -> dict[str, Any]:
    """A greedy answer to a prompt."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    headers = {"authorization": f"Bearer {os.environ[KEYS[name]]}"}
    response = await http.post("/v1/chat/completions", json=body | {"return_token_ids": True}, headers=headers)
    response.raise_for_status()
    return dict(response.json())


async def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts")
    parser.add_argument("--then", type=Path, help="JSONL file of prompts for the second half")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two prompts, in which it may learn")
    options = parser.parse_args()
    async with httpx.AsyncClient(base_url=options.url, timeout=300.0) as http:
        await compare(http, [file for file in (options.prompts, options.then) if file is not None], options)


if __name__ == "__main__":
    asyncio.run(main())
