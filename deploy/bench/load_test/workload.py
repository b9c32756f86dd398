"""The requests of a load test: their prompts, and when each is sent."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest

from deploy.bench.load_test.options import Endpoint, LoadOptions
from deploy.bench.race.tasks import read_tasks

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
"""Common English words, each one token in most vocabularies."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a load test."""

    prompt: str
    seed: int
    max_tokens: int
    temperature: float
    ignore_eos: bool

    def body(self, endpoint: Endpoint, model: str) -> dict[str, object]:
        """The JSON body: a streamed request that reports its usage."""
        body: dict[str, object] = {
            "model": model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if endpoint is Endpoint.CHAT:
            return {**body, "messages": [{"role": "user", "content": self.prompt}]}
        return {**body, "prompt": self.prompt}


def make_requests(options: LoadOptions) -> tuple[LoadRequest, ...]:
    """The requests of every measurement. Raises `ConfigurationError` for files that cannot be read."""
    if options.prompts:
        tasks = read_tasks(options.prompts, (), 1 << 30, None, None)
        rows = zip_longest(*tasks.values())
        texts = [prompt.text for row in rows for prompt in row if prompt is not None]
    else:
        draw = random.Random(options.seed)  # noqa: S311 - prompts, not secrets
        texts = [" ".join(draw.choices(_WORDS.split(), k=options.random_input_len)) for _ in range(options.num_prompts)]
    return tuple(
        LoadRequest(text, options.seed + index, options.max_tokens, options.temperature, options.ignore_eos)
        for index, text in enumerate(islice(cycle(texts), options.num_prompts))
    )


def arrival_seconds(count: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """When each of `count` requests is sent, in seconds after the first, which is sent at 0.

    Gaps follow a gamma distribution with mean 1 / rate. With `burstiness` 1 it is exponential: a Poisson process.
    """
    if math.isinf(rate):
        return (0.0,) * count
    draw = random.Random(seed)  # noqa: S311 - arrivals, not secrets
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += draw.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return tuple(times)
