"""Answers of `pilotfish serve` against those of llama.cpp from the same packaged GGUF file, over HTTP, in turn.

`llama-server` starts once. The clusters start one after another, and each answers the same prompts as llama.cpp in
turn. Both answer greedily with the same number of tokens, and neither reuses a prompt.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import httpx

from tests.bench.options import SPEC_BENCH, Options, file_prompts
from tests.bench.processes.llama_server import LlamaServer, install, missing_tools
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.report import heading, ratios, spread, table, write
from workers.model.stored.source import stored_file

PRESET = "cpu"
_PLAIN = ("draft.methods=[]", "draft.method=none")
_STORED, _WIDENED = ("target.quantization=stored",), ("target.quantization=none",)
VARIANTS = {
    "stored": (*_STORED, *_PLAIN),
    "stored-drafts": _STORED,
    "plain": (*_WIDENED, *_PLAIN),
    "plain-drafts": _WIDENED,
    "int8": ("target.quantization=int8", *_PLAIN),
}
"""What is measured, and its settings: weights as the file stores them, widened or rounded to int8, and no drafts or
default ones."""
GOALS = {("stored", 1): 2.2, ("stored-drafts", 1): 3.0, ("stored", 8): 6.0}
"""Rates that these variants should reach at these batch sizes, as multiples of llama.cpp's."""
INT8_GOAL = 1.25
"""Rate that stored weights should reach at batch 1, as a multiple of that of int8 weights."""
DTYPE = "bfloat16"
BATCHES = (1, 8)
PROMPTS, QUICK_PROMPTS = 8, 2
"""Least number of prompts of a measurement; two for each request in flight if that is more."""
CONTEXT = 2048
"""Longest sequence in llama.cpp, in tokens."""
_TIMEOUT_SECONDS = 600.0


@dataclass
class Rates:
    """Tokens per second of one variant at one batch size, and of llama.cpp just before or after: one each per turn."""

    ours: list[float] = field(default_factory=list)
    llama: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Our rate ÷ that of llama.cpp, per turn."""
        return ratios(self.ours, self.llama)


def run(options: Options) -> None:
    """Measure and report. Says why if llama.cpp cannot be built here."""
    heading("Beside llama.cpp on the same file")
    if reason := missing_tools():
        write(f"skipped: {reason}")
        return
    try:
        program = install(options.environments)
    except subprocess.CalledProcessError as error:
        write(f"skipped: llama.cpp was not built: {error}")
        return
    model = Path(options.configuration("target.quantization=stored").target.path)
    file = stored_file(model)
    if file is None:
        raise RuntimeError(f"target.path={str(model)!r}: needed a model that was converted from a GGUF file")
    batches = options.batches or BATCHES
    wanted = sum(_each(options, batch) for batch in batches) * (options.repeats + 1)
    prompts = file_prompts(options.prompts_file or SPEC_BENCH, wanted)
    write(f"{file.name}; {options.answer_tokens} tokens each, greedy, over HTTP; {options.repeats} turns")
    found: dict[tuple[str, int], Rates] = {}
    with LlamaServer(program, file, together=max(batches), context=CONTEXT) as llama:
        for name in options.variants or VARIANTS:
            settings = (f"target.dtype={DTYPE}", "target.kv.prefix_cache=false", *VARIANTS[name])
            fresh = iter(prompts)
            with ServeCommand(options.config or PRESET, (*settings, *options.assignments)) as cluster:
                for batch in batches:
                    turns = [list(islice(fresh, _each(options, batch))) for _ in range(options.repeats + 1)]
                    found[name, batch] = _compare(
                        (cluster.http_url, llama.http_url), turns, options.answer_tokens, batch
                    )
                    write(f"{name}, batch {batch}: {spread(found[name, batch].ratios)} × llama.cpp")
    _report(found)


def _each(options: Options, batch: int) -> int:
    """Prompts of one measurement."""
    return QUICK_PROMPTS if options.quick else max(PROMPTS, 2 * batch)


def _compare(urls: tuple[str, str], turns: Sequence[Sequence[str]], tokens: int, batch: int) -> Rates:
    """Both answer the first prompts, which are not counted; then ours and llama.cpp, llama.cpp and ours, and so on."""
    rates = Rates()
    for turn, prompts in enumerate(turns):
        order = urls if turn % 2 else urls[::-1]
        measured = {url: asyncio.run(_rate(url, prompts, tokens, batch)) for url in order}
        if turn:
            rates.ours.append(measured[urls[0]])
            rates.llama.append(measured[urls[1]])
    return rates


async def _rate(url: str, prompts: Sequence[str], tokens: int, batch: int) -> float:
    """Tokens per second of all answers, prompts included. Raises `RuntimeError` for an answer of another length."""
    slots = asyncio.Semaphore(batch)
    async with httpx.AsyncClient(timeout=_TIMEOUT_SECONDS) as client:

        async def answer(prompt: str) -> None:
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": tokens}
            own = {"ignore_eos": True, **({} if is_ours else {"cache_prompt": False})}
            async with slots:
                response = await client.post(f"{url}/v1/chat/completions", json={"model": model, **body, **own})
            response.raise_for_status()
            given = response.json()["usage"]["completion_tokens"]
            if given != tokens:
                raise RuntimeError(f"{url}: an answer has {given} tokens; needed {tokens}")

        served = (await client.get(f"{url}/v1/models")).json()["data"][0]
        model, is_ours = served["id"], served.get("owned_by") != "llamacpp"
        begun = time.perf_counter()
        await asyncio.gather(*map(answer, prompts))
        return tokens * len(prompts) / (time.perf_counter() - begun)


def _report(found: dict[tuple[str, int], Rates]) -> None:
    rows = []
    for (name, batch), rates in found.items():
        each, goal = rates.ratios, GOALS.get((name, batch))
        verdict = "" if goal is None else f"{goal:g}: {_verdict(statistics.median(each), goal)}"
        rows.append([name, str(batch), spread(rates.llama, 1), spread(rates.ours, 1), spread(each), verdict])
    table(("weights", "batch", "llama.cpp, tokens/s", "tokens/s", "÷ llama.cpp", "median ≥"), rows)
    stored, rounded = (found.get((name, 1)) for name in ("stored", "int8"))
    if stored is not None and rounded is not None:  # each beside llama.cpp, since the machine changes in between
        gain = statistics.median(stored.ratios) / statistics.median(rounded.ratios)
        write(
            f"batch 1, stored ÷ int8, medians ÷ llama.cpp's: {gain:.2f}; ≥ {INT8_GOAL:g}: {_verdict(gain, INT8_GOAL)}"
        )


def _verdict(value: float, goal: float) -> str:
    return "yes" if value >= goal else "NO"
