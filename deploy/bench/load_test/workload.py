"""The requests of a load test: their prompts, and when each is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, cycle, islice, zip_longest

from deploy.bench.load_test.options import Endpoint, LoadOptions
from deploy.bench.measuring.setup import read_tasks

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


def make_requests(options: LoadOptions) -> Iterator[tuple[LoadRequest, ...]]:
    """The requests of one measurement after another, without end. The first yields the request before all of them.

    Each measurement has prompts that none before it had, as long as the files last; then they begin anew.
    With `options.same_prompts`, all have the prompts of the first. Raises `ConfigurationError` for unreadable files.
    """
    texts = _texts(options)
    yield tuple(_requests(options, islice(texts, 1)))
    first = tuple(_requests(options, islice(texts, options.num_prompts)))
    yield first
    while True:
        yield first if options.same_prompts else tuple(_requests(options, islice(texts, options.num_prompts)))


def _texts(options: LoadOptions) -> Iterator[str]:
    """The prompts, without end: those of the files, one of each task in turn, or random words."""
    if options.prompts:
        tasks = read_tasks(options.prompts, (), 1 << 30, None, None)
        rows = zip_longest(*tasks.values())
        return cycle([prompt.text for row in rows for prompt in row if prompt is not None])
    draw, words = random.Random(options.seed), _WORDS.split()  # noqa: S311 - prompts, not secrets
    return (" ".join(draw.choices(words, k=options.random_input_len)) for _ in count())


def _requests(options: LoadOptions, texts: Iterator[str]) -> Iterator[LoadRequest]:
    for index, text in enumerate(texts):
        yield LoadRequest(text, options.seed + index, options.max_tokens, options.temperature, options.ignore_eos)


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
