"""Where the time of a round goes: inside `pilotfish serve`, against the same step computed by the engine alone.

One answer at a time, so each round has one row. Drafts are synthetic chains that are always rejected: every step has
the same number of tokens, and a proposal costs next to nothing. The engine alone runs while the cluster is idle.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from tests.bench.client import RequestOptions, ask, connected
from tests.bench.decoding import Decoding, decoding
from tests.bench.options import Options
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.processes.serve_report import cpu_seconds, histograms
from tests.bench.report import heading, ratios, spread, table, write

PROMPT, TOKENS, QUICK_TOKENS = 16, 192, 8
DRAFTED = 7
"""Drafted tokens of a step, beside the last committed token."""
WARM_STEPS, TIMED_STEPS = 8, 48
PARTS = {
    "round": "whole round",
    "propose_latency": "wait for drafts",
    "step_latency": "step, as the coordinator sees it",
    "target_step": "step, as the target sees it",
}
"""Histograms of the coordinator, and what they time."""
Milliseconds = dict[str, list[float]]
"""Milliseconds of a round or of CPU time in a round, by part; one value per repetition."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Round: where its time goes, against the step alone")
    torch.set_num_threads(os.cpu_count() or 1)
    settings = (
        *("draft.method=synthetic", "draft.placement=drafter", "draft.synthetic.acceptance=[0.0]"),
        *("draft.synthetic.seconds=0", "draft.controller=off"),
        *(f"draft.max_nodes={DRAFTED}", f"draft.max_depth={DRAFTED}"),
        *options.assignments,
    )
    configuration = options.configuration(*settings)
    spent: dict[int, Milliseconds] = {drafted: defaultdict(list) for drafted in (0, DRAFTED)}
    busy: dict[int, Milliseconds] = {drafted: defaultdict(list) for drafted in (0, DRAFTED)}
    with (
        decoding(configuration.target, configuration.scheduler.max_step_tokens) as engine,
        ServeCommand(options.config, settings) as server,
    ):
        for repeat in range(options.repeats + 1):  # the first one warms up
            for drafted in spent:
                times = asyncio.run(_rounds(server, options, drafted))
                alone = _alone(engine, options.long_prompt(PROMPT, 0), 1 + drafted, options.quick)
                if repeat:
                    for name, value in (times[0] | {"alone": alone}).items():
                        spent[drafted][name].append(value)
                    for role, value in times[1].items():
                        busy[drafted][role].append(value)
                    inside = times[0]["target_step"]
                    write(f"repetition {repeat}, {1 + drafted} tokens: {inside:.1f} ms, alone {alone:.1f} ms")
    _report(spent, busy)


async def _rounds(server: ServeCommand, options: Options, drafted: int) -> tuple[dict[str, float], dict[str, float]]:
    """The mean milliseconds of a round's parts, and the CPU milliseconds of each role in a round."""
    tokens = QUICK_TOKENS if options.quick else TOKENS
    async with connected(server.grpc_address) as client:
        before, used = histograms(server.http_url), cpu_seconds(server.pid)
        prompt = options.long_prompt(PROMPT, drafted)
        await ask(client, prompt, tokens, request_options=RequestOptions(max_draft_tokens=drafted))
        after, used_after = histograms(server.http_url), cpu_seconds(server.pid)
    spent = {}
    for name in ("propose_latency", "step_latency", "target_step", "round_overhead"):
        seconds, count = (now - then for now, then in zip(after[name], before[name], strict=True))
        spent[name] = 1e3 * seconds / max(1.0, count)
    rounds = after["target_step"][1] - before["target_step"][1]
    spent["round"] = spent.pop("round_overhead") + spent["target_step"] + spent["propose_latency"]
    return spent, {role: 1e3 * (used_after[role] - used[role]) / rounds for role in used_after}


def _alone(engine: Decoding, prompt: tuple[int, ...], queries: int, quick: bool) -> float:
    """Median milliseconds of a step of the engine, with about as many stored tokens as in the cluster."""
    engine.add("alone", prompt)
    for _ in range(WARM_STEPS):
        engine.step(queries)
    seconds = statistics.median(engine.step(queries) for _ in range(2 if quick else TIMED_STEPS))
    engine.clear()
    return 1e3 * seconds


def _report(spent: Mapping[int, Milliseconds], busy: Mapping[int, Milliseconds]) -> None:
    columns = ["", *(f"{1 + drafted} tokens, ms" for drafted in spent)]

    def row(name: str, values: Sequence[Sequence[float]], digits: int = 1) -> list[str]:
        return [name, *(spread(value, digits) for value in values)]

    rows = [row(text, [spent[drafted][part] for drafted in spent]) for part, text in PARTS.items()]
    rows.append(row("step of the engine alone", [spent[drafted]["alone"] for drafted in spent]))
    inside = [ratios(parts["target_step"], parts["alone"]) for parts in spent.values()]
    rows.append(row("target's step ÷ alone (not ms)", inside, 2))
    table(columns, rows)
    roles = sorted({role for roles in busy.values() for role in roles})
    write("CPU time in a round, by process:")
    table(columns, [row(role, [roles_of[role] for roles_of in busy.values()]) for role in roles])
