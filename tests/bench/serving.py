"""Measure the whole cluster: tokens per second with and without drafts, and what a round costs beside its step.

    python -m tests.bench.serving [--pairs 2] [--tokens 48] [--prompts FILE.jsonl] [--set key=value …]

The configurations run in turn, plain and drafted alternating, on one cluster after another in this one run;
every ratio is of two neighbours, and its spread is over the pairs. Prints; asserts nothing about time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

from cluster.ingress.chat_template import Message
from cluster.ingress.tokenizer import Tokenizer
from cluster.wire.clients import GenerationClient
from deploy.models import resolve_models
from deploy.running import ServeCluster, with_ports
from deploy.settings import Settings, read
from pilotfish.v1 import common_pb2, generation_pb2
from tests.prompts import CHAT

BATCHES = (1, 4, 8)
METHODS = ("none", "ngram")
ROUND = "pilotfish:round_overhead_seconds"
STEP = "pilotfish:target_step_seconds"
PROPOSE = "pilotfish:propose_latency_seconds"


@dataclass
class Run:
    """One configuration at one batch size, once through all prompts."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    step_seconds: float = 0.0
    """Mean of the target's own time per round."""
    overhead_seconds: float = 0.0
    """Mean per round of everything but the forward pass and the drafter: coordinator and gRPC."""
    propose_seconds: float = 0.0
    """Mean per round of waiting for drafts, gRPC included."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def overhead_share(self) -> float:
        return (self.overhead_seconds + self.propose_seconds) / self.step_seconds


def totals(url: str) -> dict[str, tuple[float, float]]:
    """Sum and count of each histogram, from `/metrics`."""
    values: dict[str, list[float]] = {name: [0.0, 0.0] for name in (ROUND, STEP, PROPOSE)}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        for name, entry in values.items():
            if line.startswith(f"{name}_sum"):
                entry[0] += float(line.split()[-1])
            elif line.startswith(f"{name}_count"):
                entry[1] += float(line.split()[-1])
    return {name: (entry[0], entry[1]) for name, entry in values.items()}


async def ask_all(address: str, prompts: Sequence[tuple[int, ...]], tokens: int, batch: int) -> Run:
    """Greedy answers to all prompts, `batch` in flight, over one gRPC connection."""

    async def resolve() -> str:
        return address

    client = GenerationClient(resolve)
    places = asyncio.Semaphore(batch)
    run = Run()

    async def one(index: int, prompt: tuple[int, ...]) -> None:
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingCriteria(max_tokens=tokens, ignore_eos=True),
        )
        answer: list[int] = []
        async with places:
            async for response in client.generate(request, 3600.0):
                answer.extend(response.delta.token_ids)
                if response.HasField("finished"):
                    run.steps += response.finished.usage.target_steps
        run.answers[index] = tuple(answer)
        run.tokens += len(answer)

    begun = time.perf_counter()
    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    run.seconds = time.perf_counter() - begun
    await client.close()
    return run


def measure(cluster: ServeCluster, prompts: Sequence[tuple[int, ...]], tokens: int, batch: int) -> Run:
    before = totals(cluster.http_url)
    run = asyncio.run(ask_all(cluster.grpc_address, prompts, tokens, batch))
    after = totals(cluster.http_url)
    rounds = after[STEP][1] - before[STEP][1]
    run.step_seconds, run.overhead_seconds, run.propose_seconds = (
        (after[name][0] - before[name][0]) / rounds for name in (STEP, ROUND, PROPOSE)
    )
    return run


def transformers_rate(directory: Path, prompts: Sequence[tuple[int, ...]], tokens: int) -> float:
    """`generate` of `transformers`, greedy, one prompt after another, with as many threads as cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    begun = time.perf_counter()
    for prompt in prompts:
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return len(prompts) * tokens / (time.perf_counter() - begun)


def load_prompts(tokenizer: Tokenizer, file: Path | None, most: int) -> list[tuple[int, ...]]:
    """The tests' chat prompts, or the first turns of a JSONL file in Spec-Bench's form, evenly spread over it."""
    texts = list(CHAT)
    if file is not None:
        lines = [json.loads(line)["turns"][0] for line in file.read_text(encoding="utf-8").splitlines() if line]
        texts = lines[:: max(1, len(lines) // most)]
    return [tokenizer.encode_chat([Message("user", text, None)]) for text in texts[:most]]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (least–most)`."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(runs: dict[tuple[str, int], list[Run]], alone: float) -> None:
    """A table in Markdown."""
    write("")
    write("| drafts | batch | tokens/s | ÷ plain | committed per step | step, ms | all else, ms | share of step |")
    write("|---|---:|---:|---:|---:|---:|---:|---:|")
    for (method, batch), measured in runs.items():
        plain = runs[METHODS[0], batch]
        ratios = [run.rate / other.rate for run, other in zip(measured, plain, strict=True)]
        write(
            f"| {method} | {batch} | {spread([run.rate for run in measured], 1)} | {spread(ratios)} "
            f"| {spread([run.tokens / run.steps for run in measured])} "
            f"| {spread([run.step_seconds * 1e3 for run in measured], 1)} "
            f"| {spread([(run.overhead_seconds + run.propose_seconds) * 1e3 for run in measured], 1)} "
            f"| {spread([run.overhead_share * 100 for run in measured], 1)} % |"
        )
    best = runs[METHODS[0], 1]
    write("")
    write(
        f"transformers generate, batch 1, same prompts: {alone:.1f} tokens/s; plain ÷ transformers at batch 1: "
        f"{spread([run.rate / alone for run in best])}"
    )
    for batch in BATCHES:
        same = all(
            run.answers == other.answers
            for method in METHODS
            for run, other in zip(runs[method, batch], runs[METHODS[0], 1], strict=True)
        )
        write(f"batch {batch}: answers equal to plain decoding's at batch 1: {'yes' if same else 'NO'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="how often each configuration is measured")
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--prompts", type=Path, help="JSONL with `turns`, such as Spec-Bench's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    asked = parser.parse_args()
    settings = read(None, ["server.http_port=0", "server.grpc_port=0", *asked.set])
    settings = Settings(with_ports(settings.configuration), settings.cache_directory)
    models = resolve_models(settings.configuration, settings.cache_directory, lambda _: None)
    prompts = load_prompts(Tokenizer.load(models.target), asked.prompts, asked.count)
    write(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; {models.target.name}, "
        f"{settings.configuration.target.dtype}; {len(prompts)} prompts of "
        f"{min(map(len, prompts))}–{max(map(len, prompts))} tokens, {asked.tokens} tokens each, greedy"
    )
    alone = transformers_rate(models.target, prompts, asked.tokens)
    runs: dict[tuple[str, int], list[Run]] = {(method, batch): [] for batch in BATCHES for method in METHODS}
    with ServeCluster(settings, lambda _: None) as cluster:
        for pair in range(asked.pairs):
            for method in METHODS:
                drafting = settings.configuration.draft.model_copy(update={"method": method})
                if cluster.configuration.draft != drafting:
                    cluster.redeploy(settings.configuration.model_copy(update={"draft": drafting}))
                for batch in BATCHES:
                    runs[method, batch].append(measure(cluster, prompts, asked.tokens, batch))
                    write(f"pair {pair + 1}, {method}, batch {batch}: {runs[method, batch][-1].rate:.1f} tokens/s")
    report(runs, alone)


if __name__ == "__main__":
    main()
