"""Tokens per step over time of a draft that learns, beside the same draft frozen, at one server over HTTP.

    python -m tests.bench.learning --prompts jfleg_dev.jsonl --then multi30k_val.jsonl --minutes 60 \\
        --results learning.json --plot learning.png

Starts `pilotfish serve` with `draft.learn: on` and two API keys: one has `learn`, one has not. Both ask for the same
greedy answers in turn, so that they differ in their drafts alone. From `--switch` on, the prompts are those of
`--then`. Before, a server without a learner answers the first prompts, whose times show whether a learner slows others.
All texts are compared token for token. Each minute prints a line. Lines with `source`, as in JFLEG, become corrections.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import secrets
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from deploy.bench.evaluation.tasks.correction import read_correction
from deploy.bench.report.charts import empty_plot, png
from tests.bench.machine import describe
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.report import heading, keep, percentile, table, write
from workers.distill.prompts import read_prompts

LEARNING, FROZEN, WATCH = "learning", "frozen", "watch"
_VERSION = "pilotfish:draft_version"
AnswersType = TypeVar("AnswersType")


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer, with times in seconds."""

    tokens: tuple[int, ...]
    steps: int
    """Steps of the target, that of the prompt included."""
    first_token: float
    """From the request to the first token."""
    per_token: float
    """Mean time of a token after those that arrived first."""
    seconds: float


@dataclass
class Minute:
    """The answers of one minute by the name of their key."""

    end: float
    """Minutes since the beginning."""
    part: int
    """0: the prompts of the first file; 1: those of the second one."""
    version: int = 0
    """The version that drafts for the key that learns."""
    different: int = 0
    """Prompts whose answers differ."""
    answers: dict[str, list[Answer]] = field(default_factory=lambda: {LEARNING: [], FROZEN: []})


def tokens_per_step(answers: Sequence[Answer]) -> float:
    """Mean tokens that one step of the target adds to an answer."""
    return sum(len(answer.tokens) for answer in answers) / max(1, sum(answer.steps for answer in answers))


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Tokens in the time that a reader waits for them."""
    return sum(len(answer.tokens) for answer in answers) / max(1e-9, sum(answer.seconds for answer in answers))


class Clients:
    """Asks a running server in the name of each API key."""

    def __init__(self, http: httpx.AsyncClient, keys: dict[str, str], most_tokens: int) -> None:
        self._http, self._keys, self._most_tokens = http, keys, most_tokens

    async def ask(self, name: str, prompt: str) -> Answer:
        """A greedy answer. Raises `httpx.HTTPStatusError`, and `RuntimeError` for an answer that does not end."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": self._most_tokens, "temperature": 0}
        body |= {"stream": True, "return_token_ids": True}
        tokens: list[int] = []
        arrivals: list[tuple[float, int]] = []
        choice: dict[str, Any] = {}
        asked = time.perf_counter()
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=self._headers(name)) as events:
            if events.is_error:
                await events.aread()
            events.raise_for_status()
            async for line in events.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    if found := choice.get("token_ids"):
                        tokens += found
                        arrivals.append((time.perf_counter(), len(found)))
        if "receipt" not in choice or not arrivals:
            raise RuntimeError(f"the answer to {prompt!r} has no receipt or no token")
        (first, together), (last, _) = arrivals[0], arrivals[-1]
        per_token = (last - first) / max(1, len(tokens) - together)
        steps = int(choice["receipt"]["target_passes"])
        return Answer(tuple(tokens), steps, first - asked, per_token, last - asked)

    async def version(self) -> int:
        """The newest version that drafts; 0: that of the files."""
        response = await self._http.get("/metrics", headers=self._headers(WATCH))
        response.raise_for_status()
        values = [line.split()[-1] for line in response.text.splitlines() if line.startswith(_VERSION)]
        return max((int(float(value)) for value in values), default=0)

    def _headers(self, name: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self._keys[name]}"}


async def answers_without_learner(
    clients: Clients, prompts: Iterator[str], options: argparse.Namespace
) -> list[Answer]:
    """The answers to the first prompts, as many as the time allows."""
    end, found = time.monotonic() + 60 * options.without, []
    while time.monotonic() < end:
        found.append(await clients.ask(FROZEN, next(prompts)))
        await asyncio.sleep(options.pause)
    return found


async def compare(clients: Clients, parts: Sequence[Sequence[str]], options: argparse.Namespace) -> list[Minute]:
    """Ask for the prompts of the first part until the switch, then for those of the second one."""
    begun, minutes, turn = time.monotonic(), [], itertools.count()
    switch = options.minutes / 2 if options.switch is None else options.switch
    ends = (switch, options.minutes) if len(parts) > 1 else (options.minutes,)
    for part, (texts, last) in enumerate(zip(parts, ends, strict=True)):
        prompts, end = itertools.cycle(texts), begun + 60 * last
        while (now := time.monotonic()) < end - 1:  # no minute for a remainder
            minute = Minute((min(now + 60, end) - begun) / 60, part)
            while time.monotonic() < begun + 60 * minute.end:
                prompt = next(prompts)
                # Who asks first changes, since whoever comes after a pause may wait until the learner stands still.
                for name in (LEARNING, FROZEN) if next(turn) % 2 else (FROZEN, LEARNING):
                    minute.answers[name].append(await clients.ask(name, prompt))
                one, other = (found[-1].tokens for found in minute.answers.values())
                minute.different += one != other
                await asyncio.sleep(options.pause)
            minute.version = await clients.version()
            minutes.append(minute)
            write(json.dumps(dict(zip(COLUMNS, row(minute), strict=True))))
    return minutes


COLUMNS = ("minute", "prompts", "version", "differ", "τ, learning", "τ, frozen", "tok/s, learning", "tok/s, frozen")


def row(minute: Minute) -> list[str]:
    """The figures of a minute."""
    found = minute.answers.values()
    counts = (str(len(minute.answers[FROZEN])), str(minute.version), str(minute.different))
    taus = (f"{tokens_per_step(answers):.2f}" for answers in found)
    return [f"{minute.end:.1f}", *counts, *taus, *(f"{tokens_per_second(answers):.1f}" for answers in found)]


def show(minutes: Sequence[Minute], without: Sequence[Answer]) -> None:
    """Print all tables."""
    heading("A draft that learns while it serves")
    table(COLUMNS, [row(minute) for minute in minutes])
    table(("prompts", "τ, learning", "τ, frozen", "gain"), gains(minutes))
    everything = [(name, answers_of(minutes, name)) for name in (LEARNING, FROZEN)]
    table(TIME_COLUMNS, [times(name, answers) for name, answers in everything])
    beside = answers_of([minute for minute in minutes if minute.part == 0], FROZEN)[: len(without)]
    count = len(beside)
    if count:
        heading(f"The first {count} prompts, frozen draft")
        parts = (beside, without[:count])
        rows = [times(name, answers) for name, answers in zip(("with a learner", "without"), parts, strict=True)]
        ratios = [one / other for one, other in zip(*map(quantiles, parts), strict=True)]
        table(TIME_COLUMNS, [*rows, ["with ÷ without", "", *(f"{ratio:.2f}" for ratio in ratios)]])
    different = sum(minute.different for minute in minutes)
    different += sum(one.tokens != other.tokens for one, other in zip(beside, without, strict=False))
    write(f"Answers that differ: {different} of {len(everything[1][1]) + count}")


def answers_of(minutes: Sequence[Minute], name: str) -> list[Answer]:
    """All answers for a key, in order."""
    return [answer for minute in minutes for answer in minute.answers[name]]


def gains(minutes: Sequence[Minute]) -> list[list[str]]:
    """Tokens per step in the quarters of each part, by both keys, and how much more the one that learns has."""
    rows = []
    for part in sorted({minute.part for minute in minutes}):
        both = [answers_of([minute for minute in minutes if minute.part == part], name) for name in (LEARNING, FROZEN)]
        for quarter in range(4):
            places = slice(len(both[0]) * quarter // 4, len(both[0]) * (quarter + 1) // 4)
            learning, frozen = (tokens_per_step(answers[places]) for answers in both)
            gain = f"{learning / frozen - 1:+.1%}" if frozen else "–"
            rows.append([f"file {part + 1}, quarter {quarter + 1}", f"{learning:.2f}", f"{frozen:.2f}", gain])
    return rows


TIME_COLUMNS = ("", "answers", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms")


def times(name: str, answers: Sequence[Answer]) -> list[str]:
    """The row of `TIME_COLUMNS` with these answers' times."""
    return [name, str(len(answers)), *(f"{1000 * value:.1f}" for value in quantiles(answers))]


def quantiles(answers: Sequence[Answer]) -> list[float]:
    """Median and 99th percentile of the time to the first token, then of the mean time of a later one, in seconds."""
    kinds = ([answer.first_token for answer in answers], [answer.per_token for answer in answers])
    return [value for kind in kinds for value in (statistics.median(kind), percentile(kind, 0.99))]


def plot(minutes: Sequence[Minute], about: str) -> bytes | None:
    """Tokens per step and per second over time, as a PNG; `None` without matplotlib, which is optional."""
    found = empty_plot((about,), "a draft that learns, beside the same draft frozen", 9.0)
    if found is None:
        return None
    figure, axes = found
    speed = axes.twinx()
    ends = [minute.end for minute in minutes]
    for name, color in ((LEARNING, "tab:red"), (FROZEN, "tab:blue")):
        every = [minute.answers[name] for minute in minutes]
        axes.plot(ends, [tokens_per_step(answers) for answers in every], "o-", color=color, label=f"τ, {name}")
        speeds = [tokens_per_second(answers) for answers in every]
        speed.plot(ends, speeds, ":", color=color)
        axes.plot([], [], ":", color=color, label=f"tokens per second, {name}")
    for before, after in itertools.pairwise(minutes):
        if after.version > before.version:
            axes.axvline(after.end, color="0.85", zorder=0)
        if after.part != before.part:
            axes.axvline(before.end, color="black", linestyle="--", label="other prompts")
    axes.plot([], [], color="0.85", label="a new version drafts")
    axes.set(xlabel="minutes", ylabel="tokens per step (τ)", ylim=(1, None))
    speed.set(ylabel="tokens per second", ylim=(0, None))
    return png(figure, axes)


def prompts_of(file: Path) -> list[str]:
    """The first user turn of every line. Raises `ConfigurationError`."""
    with file.open(encoding="utf-8") as lines:
        is_correction = "source" in json.loads(next(lines, "{}"))
    if is_correction:
        return [example.instruction for example in read_correction(file, 1, 1_000_000).examples]
    return [prompt.turns[0] for prompt in read_prompts(file) if prompt.turns]


def run(options: argparse.Namespace) -> tuple[list[Minute], list[Answer]]:
    """Start both servers, one after the other, and ask them."""
    parts = [prompts_of(file) for file in (options.prompts, options.then) if file is not None]
    keys = {name: secrets.token_hex(16) for name in (LEARNING, FROZEN, WATCH)}
    marks = {LEARNING: " learn", FROZEN: "", WATCH: " admin"}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "keys")
        file.touch(0o600)
        file.write_text("".join(f"{name} {key}{marks[name]}\n" for name, key in keys.items()))
        settings = ["draft.method=heads", *options.set, f"server.api_key_file={file}"]
        without: list[Answer] = []
        if options.without:
            first = itertools.cycle(parts[0])
            with ServeCommand(options.config, [*settings, "draft.learn=off"]) as server:
                without = asked(server, keys, options, lambda clients: answers_without_learner(clients, first, options))
        with ServeCommand(options.config, [*settings, "draft.learn=on"]) as server:
            minutes = asked(server, keys, options, lambda clients: compare(clients, parts, options))
    return minutes, without


def asked(
    server: ServeCommand,
    keys: dict[str, str],
    options: argparse.Namespace,
    work: Callable[[Clients], Awaitable[AnswersType]],
) -> AnswersType:
    """What `work` gets from a server that has answered a first request."""

    async def connected() -> AnswersType:
        async with httpx.AsyncClient(base_url=server.http_url, timeout=300.0) as http:
            clients = Clients(http, keys, options.tokens)
            await clients.ask(FROZEN, "Hello!")
            return await work(clients)

    return asyncio.run(connected())


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of prompts")
    parser.add_argument("--then", type=Path, help="JSONL file of prompts after the switch")
    parser.add_argument("--switch", type=float, help="minute from which on --then is asked; default: half")
    parser.add_argument("--minutes", type=float, default=60.0, help="time with a learner")
    parser.add_argument("--without", type=float, default=10.0, help="minutes before, without a learner; 0: none")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two prompts, in which it may learn")
    parser.add_argument("--config", default="cpu", help="preset or file of settings")
    parser.add_argument("--set", action="append", default=[], help="a setting, as in draft.max_nodes=16; repeatable")
    parser.add_argument("--results", type=Path, help="file for the tables, as in tests/bench/results")
    parser.add_argument("--plot", type=Path, help="file for a plot, PNG")
    options = parser.parse_args()
    machine = describe()
    write(machine)
    minutes, without = run(options)
    show(minutes, without)
    if options.results is not None:
        keep(options.results, machine, shlex.join(["python", "-m", "tests.bench.learning", *sys.argv[1:]]))
    if options.plot is not None and (picture := plot(minutes, machine)) is not None:
        options.plot.write_bytes(picture)


if __name__ == "__main__":
    main()
