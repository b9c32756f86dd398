"""`make soak`: random traffic for a long time; every text right, nothing held at the end, memory flat.

    python -m tests.soak [--minutes 30] [--seed 0] [--model PATH] [--set key=value …]

Ends with 1 when a text was wrong, a request failed, blocks stayed in use, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig

from cluster.core.config import MIB, Configuration
from cluster.ingress.text.tokenizer import Tokenizer
from cluster.wire.generation_client import GenerationClient
from deploy.coordinator_server import fixed_address
from deploy.local.local_cluster import LocalCluster
from deploy.settings import load_settings, parse_assignments
from tests.soak.asks import KINDS, MOST_TOKENS, Catalogue
from tests.soak.reference import Reference
from tests.soak.traffic import Findings, Traffic
from tests.soak.watch import Resident, read_counts
from tests.support import tiny, tiny_tokenizer
from tests.support.prompts import PLAIN
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Of the tiny model; `mistral` has a sliding window."""
POOL_TOKENS = 1200
"""What the pool holds: a few long answers, and a tenth of what is asked for at once."""
JUDGED_SECONDS = 300.0
"""Of shorter runs the memory's slope says nothing."""
SETTLE_SECONDS = 30.0
COUNTS = (
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "pilotfish:target_replays_total",
    "pilotfish:request_errors_total",
    "pilotfish:loop_restarts_total",
    "pilotfish:drafter_fallback_total",
)
"""Of the server's own; those of `pilotfish:` that are not named here are printed too when they are counters."""


def write(line: str) -> None:
    """At once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def make_tiny(directory: Path, family: str) -> Path:
    """A random model of four layers with a byte-level tokenizer."""
    changes = {"vocab_size": 320, "num_hidden_layers": 4, "max_position_embeddings": MOST_TOKENS}
    tiny.save(directory, tiny.FAMILIES[family](**changes))
    return tiny_tokenizer.byte_level(directory)


def configure(model: Path, disk: Path, assignments: list[str]) -> Configuration:
    """Every part that holds memory is on, and too small; the tiers together take a few times what the pool does."""
    shape = AutoConfig.from_pretrained(model).get_text_config()
    heads = shape.num_key_value_heads or shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    pool_bytes = max(MIB, POOL_TOKENS * shape.num_hidden_layers * 2 * heads * head_dim * 4)
    chosen: dict[str, object] = {
        "target.path": str(model),
        "target.served_name": "soak",
        "target.dtype": "float32",
        "target.compile": "off",
        "target.max_context_len": MOST_TOKENS,
        "target.kv.pool_bytes": pool_bytes,
        "target.kv.host_bytes": pool_bytes // 2,
        "target.kv.disk_directory": str(disk),
        "target.kv.disk_bytes": 2 * pool_bytes,
        "draft.method": "ngram",
        "scheduler.max_sequences": 24,
        "scheduler.max_step_tokens": 128,
        "scheduler.max_prompt_tokens": 64,
        "scheduler.max_waiting": 1000,
        "server.grpc_port": 0,
    }
    return load_configuration({}, chosen | parse_assignments(assignments))


async def soak(configuration: Configuration, asked: argparse.Namespace) -> bool:
    """Run the traffic; whether all was well."""
    model = Path(configuration.target.path)
    tokenizer = Tokenizer.load(model)
    catalogue = Catalogue(
        [tokenizer.encode(text) for text in PLAIN], asked.kinds.split(","), asked.distinct, asked.seed
    )
    reference = Reference(model, asked.bound)
    begun = time.monotonic()
    for one in catalogue.asks:
        reference.answers(one)
    write(f"references: {len(catalogue.asks)} requests in {time.monotonic() - begun:.1f} s; seed {asked.seed}")
    async with LocalCluster(configuration) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        traffic = Traffic(client, catalogue.asks, reference, asked.at_once, asked.seed)
        resident = Resident()
        background = [asyncio.create_task(resident.watch()), asyncio.create_task(tell(traffic, resident, asked))]
        try:
            await traffic.run(asked.minutes * 60)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        counts = await settled(client)
        await client.close()
    return judge(traffic.findings, counts, resident, asked)


async def tell(traffic: Traffic, resident: Resident, asked: argparse.Namespace) -> None:
    """A line now and then."""
    begun = time.monotonic()
    while True:
        await asyncio.sleep(min(60.0, asked.minutes * 60 / 4))
        findings = traffic.findings
        write(
            f"{time.monotonic() - begun:6.0f} s: {findings.ended.total()} requests, {findings.tokens} tokens, "
            f"{findings.wrong} wrong, {findings.failed} failed, {resident.megabytes[-1]:.0f} MB"
        )


async def settled(client: GenerationClient) -> dict[str, float]:
    """What the server counts once nothing runs: what left in the last moment is released within a step."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        counts = await read_counts(client)
        held = (
            counts["vllm:num_requests_running"],
            counts["vllm:num_requests_waiting"],
            counts["vllm:kv_cache_usage_perc"],
        )
        if not any(held) or time.monotonic() > end:
            return counts
        await asyncio.sleep(0.2)


def judge(findings: Findings, counts: dict[str, float], resident: Resident, asked: argparse.Namespace) -> bool:
    """Print everything; whether all was well."""
    for complaint in findings.complaints:
        write(complaint)
    write("requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(findings.ended.items())))
    write(f"answer tokens: {findings.tokens}; wrong answers: {findings.wrong}; failed requests: {findings.failed}")
    write(f"answers that differ by rounding alone (scores closer than {asked.bound}): {findings.near}")
    for name in COUNTS:
        write(f"{name}: {counts.get(name, 0.0):.0f}")
    for name in sorted(counts):
        if name.startswith("pilotfish:") and name.endswith("_total") and name not in COUNTS:
            write(f"{name}: {counts[name]:.0f}")
    in_use = counts["vllm:kv_cache_usage_perc"]
    busy = counts["vllm:num_requests_running"] + counts["vllm:num_requests_waiting"]
    write(f"at the end: {in_use:.4%} of the blocks in use, {busy:.0f} requests known")
    growth = resident.growth()
    judged = resident.seconds[-1] >= JUDGED_SECONDS
    write(
        f"resident memory: {resident.megabytes[0]:.0f} MB at first, {resident.megabytes[-1]:.0f} MB at last, "
        f"{growth:+.1f} MB/hour over the last two thirds"
        + (f" (at most {asked.growth})" if judged else " (too short a run to judge)")
    )
    well = findings.is_clean and in_use == 0 and busy == 0 and not (judged and growth > asked.growth)
    write("all is well" if well else "NOT WELL")
    return well


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long new requests are made")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the clients' moods")
    parser.add_argument("--model", help="a model as `target.path` takes it; default: a tiny random one")
    parser.add_argument("--family", default="llama", choices=FAMILIES, help="of the tiny model")
    parser.add_argument("--at-once", type=int, default=32, help="clients")
    parser.add_argument("--distinct", type=int, default=64, help="distinct requests")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of requests, by name")
    parser.add_argument("--bound", type=float, default=1e-3, help="logits closer than this may swap")
    parser.add_argument("--growth", type=float, default=40.0, help="most growth of resident memory, MB/hour")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    asked = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if asked.model is None:
        torch.set_num_threads(1)  # a tiny model's threads would only wait for each other
    with tempfile.TemporaryDirectory(prefix="pilotfish-soak-") as scratch:
        if asked.model is None:
            model = make_tiny(Path(scratch, "model"), asked.family)
        else:
            model = resolve_model_directory(asked.model, load_settings().cache_directory)
        well = asyncio.run(soak(configure(model, Path(scratch, "blocks"), asked.set), asked))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
