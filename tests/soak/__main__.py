"""`make soak`: random traffic for a long time. Every answer is checked, and memory must neither leak nor grow.

    python -m tests.soak [--minutes 30] [--seed 0] [--model PATH] [--set key=value …]

Exits with 1 if an answer was wrong, a request failed, blocks stayed in use, or memory grew.
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

from cluster.core.config.base import MIB
from cluster.core.config.sections import Configuration
from cluster.generation.text.tokenizer import Tokenizer
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from deploy.settings import load_settings, parse_assignments
from tests.bench.report import write
from tests.soak.reference import Reference
from tests.soak.requests import KINDS, MAX_TOKENS, RequestCatalogue
from tests.soak.traffic import Findings, Traffic
from tests.soak.watch import Resident, read_counts
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.prompts import PLAIN
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""Families of the tiny model; `mistral` has a sliding window."""
POOL_TOKENS = 1200
"""Pool size: it stores a few long answers, and a tenth of all running requests."""
MIN_GROWTH_SECONDS = 300.0
"""Shorter runs do not show the growth of memory."""
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
"""Counters that are printed first. All other counters of `pilotfish:` follow."""


def make_tiny(directory: Path, family: str) -> Path:
    """A random model of four layers with a byte-level tokenizer."""
    changes = {"vocab_size": 320, "num_hidden_layers": 4, "max_position_embeddings": MAX_TOKENS}
    tiny.save(directory, tiny.FAMILIES[family](**changes))
    return tiny_tokenizer.byte_level(directory)


def configure(model: Path, disk: Path, assignments: list[str]) -> Configuration:
    """A cluster with all memory tiers enabled and too small. The tiers together store a few times the pool."""
    shape = AutoConfig.from_pretrained(model).get_text_config()
    heads = shape.num_key_value_heads or shape.num_attention_heads
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    pool_bytes = max(MIB, POOL_TOKENS * shape.num_hidden_layers * 2 * heads * head_dim * 4)
    chosen: dict[str, object] = {
        "target.path": str(model),
        "target.served_name": "soak",
        "target.dtype": "float32",
        "target.compile": "off",
        "target.max_context_len": MAX_TOKENS,
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


async def soak(configuration: Configuration, arguments: argparse.Namespace) -> bool:
    """Run the traffic. Returns whether all checks passed."""
    model = Path(configuration.target.path)
    tokenizer = Tokenizer.load(model)
    catalogue = RequestCatalogue(
        [tokenizer.encode(text) for text in PLAIN], arguments.kinds.split(","), arguments.distinct, arguments.seed
    )
    reference = Reference(model, arguments.bound)
    begun = time.monotonic()
    for one in catalogue.requests:
        reference.answers(one)
    write(f"references: {len(catalogue.requests)} requests in {time.monotonic() - begun:.1f} s; seed {arguments.seed}")
    async with LocalCluster(configuration) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        traffic = Traffic(client, catalogue.requests, reference, arguments.at_once, arguments.seed)
        resident = Resident()
        background = [
            asyncio.create_task(resident.watch()),
            asyncio.create_task(report_progress(traffic, resident, arguments)),
        ]
        try:
            await traffic.run(arguments.minutes * 60)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        counts = await wait_until_idle(client)
        await client.close()
    return report(traffic.findings, counts, resident, arguments)


async def report_progress(traffic: Traffic, resident: Resident, arguments: argparse.Namespace) -> None:
    """Print a progress line at intervals, until cancelled."""
    begun = time.monotonic()
    while True:
        await asyncio.sleep(min(60.0, arguments.minutes * 60 / 4))
        findings = traffic.findings
        write(
            f"{time.monotonic() - begun:6.0f} s: {findings.ended.total()} requests, {findings.tokens} tokens, "
            f"{findings.wrong} wrong, {findings.failed} failed, {resident.megabytes[-1]:.0f} MB"
        )


async def wait_until_idle(client: GenerationClient) -> dict[str, float]:
    """The server's counters once no request runs. Aborted requests are released within a step."""
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


def report(findings: Findings, counts: dict[str, float], resident: Resident, arguments: argparse.Namespace) -> bool:
    """Print all findings. Returns whether all checks passed."""
    for error in findings.errors:
        write(error)
    write("requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(findings.ended.items())))
    write(f"answer tokens: {findings.tokens}; wrong answers: {findings.wrong}; failed requests: {findings.failed}")
    write(f"answers that differ by rounding alone (scores closer than {arguments.bound}): {findings.near}")
    for name in COUNTS:
        write(f"{name}: {counts.get(name, 0.0):.0f}")
    for name in sorted(counts):
        if name.startswith("pilotfish:") and name.endswith("_total") and name not in COUNTS:
            write(f"{name}: {counts[name]:.0f}")
    in_use = counts["vllm:kv_cache_usage_perc"]
    busy = counts["vllm:num_requests_running"] + counts["vllm:num_requests_waiting"]
    write(f"at the end: {in_use:.4%} of the blocks in use, {busy:.0f} requests open")
    growth = resident.growth()
    is_long = resident.seconds[-1] >= MIN_GROWTH_SECONDS
    write(
        f"resident memory: {resident.megabytes[0]:.0f} MB at first, {resident.megabytes[-1]:.0f} MB at last, "
        f"{growth:+.1f} MB/hour over the last two thirds"
        + (f" (at most {arguments.growth})" if is_long else " (the run is too short to measure this)")
    )
    well = findings.is_clean and in_use == 0 and busy == 0 and not (is_long and growth > arguments.growth)
    write("passed" if well else "FAILED")
    return well


def main() -> None:
    """Run the soak test with the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long new requests are sent")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    parser.add_argument("--model", help="a model, as in `target.path` (default: a tiny random one)")
    parser.add_argument("--family", default="llama", choices=FAMILIES, help="family of the tiny model")
    parser.add_argument("--at-once", type=int, default=32, help="number of clients")
    parser.add_argument("--distinct", type=int, default=64, help="number of distinct requests")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of requests")
    parser.add_argument("--bound", type=float, default=1e-3, help="logits closer than this may be swapped by rounding")
    parser.add_argument("--growth", type=float, default=40.0, help="largest growth of resident memory, in MB/hour")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if arguments.model is None:
        torch.set_num_threads(1)  # a tiny model gains nothing from threads
    with tempfile.TemporaryDirectory(prefix="pilotfish-soak-") as scratch:
        if arguments.model is None:
            model = make_tiny(Path(scratch, "model"), arguments.family)
        else:
            model = resolve_model_directory(arguments.model, load_settings().cache_directory)
        well = asyncio.run(soak(configure(model, Path(scratch, "blocks"), arguments.set), arguments))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
