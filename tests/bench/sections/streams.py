"""Many streams over HTTP at once, against the engine alone with the same prompts and rows, and their CPU time.

Server and client share the machine, so each process of the way takes cores from the target.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from urllib.parse import urlsplit

import torch

from tests.bench.decoding import Decoding, decoding
from tests.bench.machine import MIB
from tests.bench.options import Options
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.processes.serve_report import cpu_seconds, histograms
from tests.bench.report import heading, spread, table, write

BATCHES, QUICK_BATCHES = (64, 256), (4,)
PROMPT = 16
POOL_BYTES = 1024 * MIB
"""Enough for all streams, so that none is preempted."""
TIMED_STEPS = 8
_TOKEN = b"data: {"
"""The beginning of each event with a token: `stream_interval` is 1, and nothing is drafted."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Streams: HTTP against the engine alone")
    torch.set_num_threads(os.cpu_count() or 1)
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    most = max(batches)
    settings = (
        "draft.method=none",
        *(f"scheduler.max_sequences={most}", f"scheduler.max_waiting={4 * most}"),
        f"target.kv.pool_bytes={POOL_BYTES}",
        *options.assignments,
    )
    configuration = options.configuration(*settings)
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    busy: dict[tuple[int, str], list[float]] = defaultdict(list)
    with (
        decoding(configuration.target, configuration.scheduler.max_step_tokens) as engine,
        ServeCommand(options.config, settings) as server,
    ):
        for repeat in range(options.repeats + 1):  # the first one warms up
            for batch in batches if repeat else (min(batches),):
                prompts = [options.long_prompt(PROMPT, repeat * most + index) for index in range(batch)]
                used, inside = _used(server.pid), histograms(server.http_url)["target_step"]
                tokens, seconds = asyncio.run(_streams(server.http_url, prompts, options.tokens))
                used_after, after = _used(server.pid), histograms(server.http_url)["target_step"]
                alone = _alone(engine, prompts, options)
                if repeat:
                    rates[batch, "HTTP, tokens/s"].append(tokens / seconds)
                    rates[batch, "target's steps inside, tokens/s"].append(tokens / (after[0] - inside[0]))
                    rates[batch, "engine alone, tokens/s"].append(alone)
                    for role, value in used_after.items():
                        busy[batch, role].append(1e3 * (value - used.get(role, 0.0)) / tokens)
                    write(f"repetition {repeat}, {batch} streams: {tokens / seconds:.0f} tokens/s, alone {alone:.0f}")
    columns = ("", *(f"{batch} streams" for batch in batches))
    names = list(dict.fromkeys(name for _, name in rates))
    lines = [[name, *(spread(rates[batch, name], 0) for batch in batches)] for name in names]
    for name in names[1:]:
        shares = [
            [whole / part for whole, part in zip(rates[batch, names[0]], rates[batch, name], strict=True)]
            for batch in batches
        ]
        lines.append([f"HTTP ÷ {name.partition(',')[0]}", *(spread(share) for share in shares)])
    table(columns, lines)
    write("CPU seconds per 1,000 tokens, by process:")
    roles = sorted({role for _, role in busy})
    table(columns, [[role, *(spread(busy[batch, role]) for batch in batches)] for role in roles])


def _used(pid: int) -> dict[str, float]:
    """CPU seconds so far, by role. This process is the client."""
    return cpu_seconds(pid) | {"client": time.process_time()}


async def _streams(url: str, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[int, float]:
    """Tokens of all streams, and seconds from the first request to the end of the last stream."""
    begun = time.perf_counter()
    counts = await asyncio.gather(*(_stream(url, list(prompt), tokens) for prompt in prompts))
    return sum(counts), time.perf_counter() - begun


async def _stream(url: str, prompt: list[int], tokens: int) -> int:
    """Ask for one stream over a socket of its own, and count its tokens. A client library would take more CPU time."""
    place = urlsplit(url)
    body = json.dumps(
        {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await reader.read()
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
        raise RuntimeError(f"the server answered {answer[:200]!r}")
    return min(tokens, answer.count(_TOKEN))


def _alone(engine: Decoding, prompts: Sequence[Sequence[int]], options: Options) -> float:
    """Tokens per second of the engine with the same prompts and as many tokens. A few of its steps are timed."""
    seconds = engine.add_all({f"s{index}": prompt for index, prompt in enumerate(prompts)})
    step = statistics.median(engine.step() for _ in range(2 if options.quick else TIMED_STEPS))
    engine.clear()
    return len(prompts) * options.tokens / (seconds + step * (options.tokens - 1))
