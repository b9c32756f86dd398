"""Where the time of a round goes: inside `pilotfish serve`, against the same step computed by the engine alone.

One answer at a time, so each round has one row; with `--batches 8`, eight at once, without drafts. Drafts are synthetic
chains that are always rejected: every step has the same number of tokens, and a proposal costs next to nothing. The
engine alone runs while the cluster is idle.

With `--lengths 400,1150`, prompts of these lengths are followed to their first token instead, without drafts, one at a
time and none twice. The engine alone computes each prompt in the parts that the cluster computes, then in one step.

With `--variants host`, what the host does in a step of a target on a GPU, without the GPU and without a cluster, in
microseconds of CPU time for each row.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import httpx
import torch

from tests.bench.client import ask, connected
from tests.bench.decoding import Decoding, decoding
from tests.bench.host_time import PARTS as HOST_PARTS
from tests.bench.host_time import SAMPLINGS, draft, host_steps, median_steps
from tests.bench.options import Options
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.processes.serve_report import cpu_seconds, histograms
from tests.bench.report import heading, ratios, spread, table, write

PROMPT, TOKENS, QUICK_TOKENS = 16, 192, 8
DRAFTED = 7
"""Drafted tokens of a step, beside the last committed token."""
LEAST_SEQUENCES = 16
WARM_STEPS, TIMED_STEPS = 8, 48
PARTS = {
    "round": "whole round",
    "round_overhead": "loop and wire: all but the target's own step and the wait for drafts",
    "propose_latency": "wait for drafts",
    "step_latency": "step, as the coordinator sees it",
    "target_step": "step, as the target sees it",
}
"""Histograms of the coordinator, and what they time."""
FIRST_TOKEN = {
    "first": "first token over HTTP",
    "steps": "the target's steps",
    "loop": "the coordinator's rounds without the target's steps",
    "rest": "the rest: client, proxy, ingress, and the wait for the first round",
    "parts": "steps of the engine alone, the same parts",
    "whole": "one step of the engine alone",
}
"""The parts of a prompt's way."""
HOST_BATCHES, HOST_CONTEXT, HOST_STEPS = (1, 8, 64), 1024, 22
"""Rows of a step, tokens stored of each, and steps, of which two are not timed."""
RECORDED_SECONDS = 0.1
"""Time in which an answer's last round gets into the histograms."""
Shape = tuple[int, int]
"""Rows of a round, and drafted tokens of each row."""
Milliseconds = dict[str, list[float]]
"""Milliseconds of a round or of CPU time in a round, by part; one value per repetition."""


def run(options: Options) -> None:
    """Measure and report."""
    torch.set_num_threads(os.cpu_count() or 1)
    if "host" in options.variants:
        _host(options)
        return
    if options.lengths:
        _prompts(options)
        return
    heading("Round: where its time goes, against the step alone")
    settings = (
        *("draft.method=synthetic", "draft.placement=drafter", "draft.synthetic.acceptance=[0.0]"),
        *("draft.synthetic.seconds=0", "draft.controller=off"),
        *(f"draft.max_nodes={DRAFTED}", f"draft.max_depth={DRAFTED}"),
        f"scheduler.max_sequences={max(options.batches or (LEAST_SEQUENCES,))}",
        *options.assignments,
    )
    configuration = options.configuration(*settings)
    shapes = [(batch, 0) for batch in options.batches] or [(1, 0), (1, DRAFTED)]
    spent: dict[Shape, Milliseconds] = {shape: defaultdict(list) for shape in shapes}
    busy: dict[Shape, Milliseconds] = {shape: defaultdict(list) for shape in shapes}
    with (
        decoding(configuration.target, configuration.scheduler.max_step_tokens) as engine,
        ServeCommand(options.config, settings) as server,
    ):
        for repeat in range(options.repeats + 1):  # the first one warms up
            for shape in shapes:
                times = asyncio.run(_rounds(server, options, shape))
                alone = _alone(engine, options, shape)
                if repeat:
                    for name, value in (times[0] | {"alone": alone}).items():
                        spent[shape][name].append(value)
                    for role, value in times[1].items():
                        busy[shape][role].append(value)
                    inside = times[0]["target_step"]
                    write(f"repetition {repeat}, {_name(shape)}: {inside:.1f} ms, alone {alone:.1f} ms")
    _report(spent, busy)


async def _rounds(server: ServeCommand, options: Options, shape: Shape) -> tuple[dict[str, float], dict[str, float]]:
    """The mean milliseconds of a round's parts, and the CPU milliseconds of each role in a round."""
    batch, drafted = shape
    tokens = QUICK_TOKENS if options.quick else TOKENS
    async with connected(server.grpc_address) as client:
        before, used = histograms(server.http_url), cpu_seconds(server.pid)
        prompts = [options.long_prompt(PROMPT, drafted + index) for index in range(batch)]
        await asyncio.gather(*(ask(client, prompt, tokens, max_draft_tokens=drafted) for prompt in prompts))
        after, used_after = histograms(server.http_url), cpu_seconds(server.pid)
    spent = {}
    for name in ("propose_latency", "step_latency", "target_step", "round_overhead"):
        seconds, count = (now - then for now, then in zip(after[name], before[name], strict=True))
        spent[name] = 1e3 * seconds / max(1.0, count)
    rounds = after["target_step"][1] - before["target_step"][1]
    spent["round"] = spent["round_overhead"] + spent["target_step"] + spent["propose_latency"]
    return spent, {role: 1e3 * (used_after[role] - used.get(role, 0.0)) / rounds for role in used_after}


def _alone(engine: Decoding, options: Options, shape: Shape) -> float:
    """Median milliseconds of a step of the engine, with about as many stored tokens as in the cluster."""
    batch, drafted = shape
    prompts = [options.long_prompt(PROMPT, index) for index in range(batch)]
    steps = 2 if options.quick else TIMED_STEPS
    return 1e3 * engine.median_step(prompts, 1 + drafted, warm=WARM_STEPS, timed=steps)


def _name(shape: Shape) -> str:
    batch, drafted = shape
    return f"{batch} rows" if batch > 1 else f"{1 + drafted} tokens"


def _report(spent: Mapping[Shape, Milliseconds], busy: Mapping[Shape, Milliseconds]) -> None:
    columns = ["", *(f"{_name(shape)}, ms" for shape in spent)]

    def row(name: str, values: Sequence[Sequence[float]], digits: int = 1) -> list[str]:
        return [name, *(spread(value, digits) for value in values)]

    rows = [row(text, [parts[part] for parts in spent.values()]) for part, text in PARTS.items()]
    rows.append(row("step of the engine alone", [parts["alone"] for parts in spent.values()]))
    inside = [ratios(parts["target_step"], parts["alone"]) for parts in spent.values()]
    rows.append(row("target's step ÷ alone (not ms)", inside, 2))
    outside = [ratios(parts["round_overhead"], parts["target_step"]) for parts in spent.values()]
    rows.append(row("loop and wire ÷ target's step (not ms)", outside, 3))
    table(columns, rows)
    roles = sorted({role for roles in busy.values() for role in roles})
    write("CPU time in a round, by process:")
    table(columns, [row(role, [roles_of[role] for roles_of in busy.values()]) for role in roles])


def _host(options: Options) -> None:
    """Measure and report what the host does in a step."""
    heading("Round: the host's part of a step on a GPU, without the GPU")
    context, batches = (16, (4,)) if options.quick else (HOST_CONTEXT, options.batches or HOST_BATCHES)
    lines: list[list[str]] = []
    with host_steps(max(batches) * (context + HOST_STEPS * (2 + DRAFTED))) as steps:
        for batch in batches:
            for name, sampling in SAMPLINGS.items():
                for drafted in (0, DRAFTED):
                    found = []
                    for _ in range(options.repeats):
                        steps.add(batch, context, sampling)
                        found.append(median_steps(steps, draft(drafted), 2 if options.quick else HOST_STEPS - 2))
                        steps.clear()
                    parts = [spread([one[part] for one in found], 1) for part in HOST_PARTS]
                    lines.append([f"{name}, {batch} rows of {1 + drafted}", *parts])
    table(("µs of a row", *HOST_PARTS.values()), lines)
    write(f"{context} tokens stored for each sequence")


def _prompts(options: Options) -> None:
    """Measure and report the way of prompts."""
    heading("Round: the way of a prompt to its first token")
    settings = ("draft.method=none", *options.assignments)
    configuration = options.configuration(*settings)
    spent: dict[int, Milliseconds] = {length: defaultdict(list) for length in options.lengths}
    with (
        decoding(configuration.target, configuration.scheduler.max_step_tokens) as in_parts,
        ServeCommand(options.config, settings) as server,
        httpx.Client(base_url=server.http_url, timeout=60.0) as client,
    ):
        engines = {"parts": in_parts, "whole": Decoding(in_parts.engine, max(options.lengths))}
        for repeat in range(options.repeats + 1):  # the first one warms up
            for index, length in enumerate(options.lengths):
                prompt = options.long_prompt(length, repeat * len(options.lengths) + index)
                times = first_token(client, server.http_url, prompt)
                for name, engine in engines.items():
                    times[name] = 1e3 * engine.add("prompt", prompt)
                    engine.clear()
                for name, value in times.items() if repeat else ():
                    spent[length][name].append(value)
    table(
        ["", *(f"{length} tokens, ms" for length in spent)],
        [[text, *(spread(parts[name], 1) for parts in spent.values())] for name, text in FIRST_TOKEN.items()],
    )
    for length, parts in spent.items():
        write(f"{length} tokens: the target's steps ÷ alone {spread(ratios(parts['steps'], parts['parts']))}")


def first_token(client: httpx.Client, url: str, prompt: Sequence[int]) -> dict[str, float]:
    """Milliseconds to the first token of a prompt, in all and by part. Raises `httpx.HTTPError`."""
    name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    body = {
        "model": name,
        "prompt": list(prompt),
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    before, begun = histograms(url), time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        next(line for line in response.iter_lines() if line)
        first = 1e3 * (time.perf_counter() - begun)
    time.sleep(RECORDED_SECONDS)
    after = histograms(url)
    steps, loop = (1e3 * (after[part][0] - before[part][0]) for part in ("target_step", "round_overhead"))
    return {"first": first, "steps": steps, "loop": loop, "rest": first - steps - loop}
