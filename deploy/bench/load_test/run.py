"""Runs a load test: draws requests, sends each at its time, at most so many in flight, and times their streams."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice, zip_longest

import httpx

from cluster.core.errors import WorkerUnavailable
from deploy.bench.contestants.endpoint import StreamReader
from deploy.bench.load_test.records import LoadRecord, Measurement
from deploy.bench.load_test.report import LoadResults, write
from deploy.bench.measuring.setup import describe_machine, read_tasks
from deploy.bench.options import Endpoint, LoadOptions, parse_goodput
from deploy.commands.client.connection import get, server_client
from deploy.network.https_client import JSON_HEADERS, check_reachable, lines_of, refusal_text, to_json, why_silent
from deploy.settings import Settings

Report = Callable[[float, str], None]
"""Called with the share of the test that is complete, and a description."""
Measured = Callable[[Measurement], None]
"""Called after every measurement."""

_LONGEST_REASON = 300
"""Most characters that are kept of why a request failed."""


class LoadTest:
    """One load test of a server through `client`, whose base address is the server's."""

    def __init__(self, options: LoadOptions, client: httpx.AsyncClient, report: Report) -> None:
        self._options = options
        self._client = client
        self._report = report
        self.model = options.model or ""
        """The measured model."""
        self._done = 0
        self.was_stopped = False
        """Whether the run was cancelled. Its last measurement has the requests that had ended."""

    async def run(self, measured: Measured) -> None:
        """Measure every rate with every concurrency, after one request that is not counted.

        Raises `WorkerUnavailable` if the server does not answer that request.
        """
        options = self._options
        requests = make_requests(options)
        (warming,) = next(requests)
        self.model = self.model or await self._first_model()
        warm = await self._send(warming, time.perf_counter())
        if warm.answer is None:
            raise WorkerUnavailable(f"{_root(self._client)}{options.endpoint.path} did not answer: {warm.error}")
        cells = [(rate, bound) for rate in options.request_rate for bound in options.max_concurrency]
        total = len(cells) * options.num_prompts
        for rate, bound in cells:
            measured(await self._measure(next(requests), rate, bound, total))
            if self.was_stopped:
                raise asyncio.CancelledError

    async def _measure(self, requests: Sequence[LoadRequest], rate: float, bound: int, total: int) -> Measurement:
        options = self._options
        slots = asyncio.Semaphore(bound or len(requests))
        times = arrival_seconds(len(requests), rate, options.burstiness, options.seed)
        begun = time.perf_counter()

        async def one(request: LoadRequest, at: float) -> LoadRecord:
            await asyncio.sleep(max(0.0, begun + at - time.perf_counter()))
            async with slots:
                record = await self._send(request, begun)
            self._done += 1
            self._report(self._done / total, f"{rate:g} requests/s, concurrency {bound or 'unbounded'}")
            return record

        sending = [asyncio.create_task(one(request, at)) for request, at in zip(requests, times, strict=True)]
        try:
            await asyncio.gather(*sending)
        except asyncio.CancelledError:  # Ctrl-C: what has ended counts
            self.was_stopped = True
        records = [task.result() for task in sending if task.done() and not task.cancelled()]
        seconds = time.perf_counter() - begun
        return Measurement(rate, bound, seconds, tuple(records), parse_goodput(options.goodput))

    async def _send(self, request: LoadRequest, begun: float) -> LoadRecord:
        """Send one request and read its answer. A failure becomes a record with its reason."""
        content = to_json(request.body(self._options.endpoint, self.model))
        sent = time.perf_counter() - begun
        reader = StreamReader()
        try:
            async with asyncio.timeout(self._options.timeout):
                path = self._options.endpoint.path
                async with self._client.stream("POST", path, content=content, headers=JSON_HEADERS) as response:
                    if response.status_code != httpx.codes.OK:
                        await response.aread()
                        return LoadRecord(sent, error=_refusal(response))
                    async for line in lines_of(response):
                        reader.line(line)
        except TimeoutError:
            return LoadRecord(sent, error="timeout")
        except httpx.HTTPError as error:
            return LoadRecord(sent, error=why_silent(error))
        except WorkerUnavailable as error:
            return LoadRecord(sent, error=str(error)[:_LONGEST_REASON])
        return LoadRecord(sent, reader.answer(), reader.prompt_tokens)

    async def _first_model(self) -> str:
        """The first model that the server lists. Raises `WorkerUnavailable`."""
        models = await get(self._client, "/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise WorkerUnavailable(f"{_root(self._client)}/v1/models names no model; name it with --model") from None


def run_load_test(options: LoadOptions, settings: Settings, command: str, report: Report) -> LoadResults:
    """Run a load test, and write its files after every measurement. Raises `PilotfishError`."""
    results = LoadResults("", describe_machine(), command)

    async def run() -> None:
        async with server_client(settings, options.url, options.cacert, options.timeout) as client:
            await check_reachable(client)
            test = LoadTest(options, client, report)

            def measured(measurement: Measurement) -> None:
                results.title = _title(options, f"{test.model} at {_root(client)}")
                results.measurements.append(measurement)
                if options.out is not None:
                    write(results, options.out)

            await test.run(measured)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        results.was_stopped = True
    return results


def _refusal(response: httpx.Response) -> str:
    """The status of a refusal and what the server says in it."""
    return f"HTTP {response.status_code}: {refusal_text(response)}"[:_LONGEST_REASON].removesuffix(": ")


def _root(client: httpx.AsyncClient) -> str:
    """The address of the server without a slash at its end."""
    return str(client.base_url).rstrip("/")


def _title(options: LoadOptions, model: str) -> str:
    """`model` names the model and the server."""
    files = ", ".join(file.name for file in options.prompts) or f"random words ({options.random_input_len} each)"
    return (
        f"{model}{options.endpoint.path}; {options.num_prompts} requests from {files}, at most "
        f"{options.max_tokens} tokens each, temperature {options.temperature:g}"
    )


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
