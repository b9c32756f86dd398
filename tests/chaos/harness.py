"""One run: streams without faults, streams with faults, and a look at what is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
from transformers import PreTrainedConfig

from cluster.core.config.base import MIB
from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from cluster.generation.text.tokenizer import Tokenizer
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from tests.chaos.cluster import ChaosCluster, Slot
from tests.chaos.doors import Door, GrpcDoor, HttpDoor
from tests.chaos.faults import Disturber
from tests.chaos.report import ChaosReport, by_role, percentiles
from tests.chaos.streams import Streams
from tests.soak.reference import Reference
from tests.soak.requests import MAX_TOKENS, RequestCatalogue, SoakRequest
from tests.soak.watch import read_counts
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import quantized, stored_gguf, tiny, tiny_tokenizer
from tests.support.models.prompts import PLAIN
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 60.0
"""Longest time until nothing is held any more after the last stream, in seconds."""
MOST_NEW_DESCRIPTORS = 8
"""Descriptors that a process may have more than at first: connections that it opened since."""
MOST_NEW_BYTES = 128 << 20
"""Memory that a process may have more than at first."""
BOUND = 1e-3
"""Scores closer than this may be swapped by rounding."""
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "gemm"}
"""Settings of stored weights. Two ranks divide the inputs of each layer into whole groups."""
GGUF_KINDS = {"embed_tokens": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q5_0", "down_proj": "Q5_1"}
"""Types of matrices in a GGUF file, beside `Q4_1`."""


@dataclass(frozen=True)
class ChaosOptions:
    """What a run does. Everything random comes from `seed`."""

    seed: int = 0
    rounds: int = 40
    """Number of faults."""
    pause_seconds: float = 0.6
    """Mean time between two faults, in seconds."""
    ranks: tuple[int, ...] = (1, 2)
    """Ranks of each target."""
    drafters: int = 2
    ingresses: int = 2
    at_once: int = 12
    distinct: int = 32
    """Number of distinct requests."""
    kinds: tuple[str, ...] = ("short", "long", "sharing", "several", "structured")
    """Kinds of requests."""
    roles: tuple[str, ...] = ()
    """Roles that faults are for; empty: all."""
    stored: Literal["awq", "gguf"] = "awq"
    """The form of weights that settings keep as they are stored."""
    most_lost: int = 2
    """Most processes that are away when a further fault is applied."""
    settings: dict[str, object] = field(default_factory=dict)


def shape_of(ranks: int) -> PreTrainedConfig:
    """The shape of a model that so many ranks can share: they divide blocks of 32 inputs, too.

    With two of them, a token takes 2 KiB of KV memory.
    """
    changes = {"num_attention_heads": 2 * ranks, "num_key_value_heads": ranks, "head_dim": 32, "num_hidden_layers": 4}
    sizes = {"hidden_size": 192, "intermediate_size": 192} if ranks > 2 else {"hidden_size": 128}
    return tiny.llama(vocab_size=320, max_position_embeddings=MAX_TOKENS, **sizes, **changes)


def configure(model: Path, settings: dict[str, object]) -> Configuration:
    """A cluster with too little KV memory, and timeouts that are short for a model of this size."""
    chosen: dict[str, object] = {
        "target.path": str(model),
        "target.served_name": "chaos",
        "target.device": "cpu",
        "target.compile": "off",
        "target.compile_directory": str(KEPT),
        "target.max_context_len": MAX_TOKENS,
        "target.kv.pool_bytes": MIB,
        "target.step_timeout_seconds": 10.0,
        "draft.method": "ngram",
        "draft.placement": "drafter",
        "draft.replicas": 2,
        "draft.controller": "off",
        "scheduler.max_sequences": 16,
        "scheduler.max_step_tokens": 128,
        "scheduler.max_waiting": 1000,
        "server.grpc_port": 0,
        "log_level": "info",
    }
    return load_configuration({}, chosen | settings)


@dataclass(frozen=True)
class Workload:
    """A model, requests, and the answers of the model alone."""

    model: Path
    requests: tuple[SoakRequest, ...]
    reference: Reference


def prepare(options: ChaosOptions, scratch: Path) -> Workload:
    """Make the model and compute all answers. `options.stored` is the form of weights that stay as they are stored."""
    shape, is_stored = shape_of(max(2, *options.ranks)), options.settings.get("target.quantization") == "stored"
    if is_stored and options.stored == "gguf":
        plain, reference = stored_gguf.convert(scratch / "gguf", "llama", shape, GGUF_KINDS)
        stored = shutil.copytree(tiny_tokenizer.byte_level(plain), scratch / "stored")
        reference.save_pretrained(plain)
        return replace(workload_of(plain, options), model=stored)
    model = tiny_tokenizer.byte_level(tiny.save(scratch / "model", shape))
    if not is_stored:
        return workload_of(model, options)
    stored = quantized.save_with_tokenizer(model, scratch / "stored", quantized.awq(8), AWQ)
    plain = resolve_model_directory(str(stored), scratch / "dequantized")
    return replace(workload_of(plain, options), model=stored)


def workload_of(model: Path, options: ChaosOptions) -> Workload:
    """Draw requests for a model with a context of `MAX_TOKENS`, and compute its answers."""
    tokenizer = Tokenizer.load(model)
    phrases = [tokenizer.encode(text) for text in PLAIN]
    requests = RequestCatalogue(phrases, options.kinds, options.distinct, options.seed).requests
    reference = Reference(model, BOUND)
    for request in requests:
        reference.answers(request)
    return Workload(model, requests, reference)


async def run_chaos(options: ChaosOptions, scratch: Path) -> ChaosReport:
    """Run streams through a cluster whose processes are killed and stopped. Returns what was seen."""
    work = prepare(options, scratch)
    configuration = configure(work.model, options.settings)
    cluster = ChaosCluster(configuration, options.ranks, options.drafters, options.ingresses, scratch, options.seed)
    own, begun = psutil.Process(), time.monotonic()
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None))
    try:
        await cluster.start()
        logger.info("all processes serve after %.1f s", time.monotonic() - begun)
        clients = [GenerationClient(fixed_address(door.address)) for door in cluster.doors]
        ingresses = [slot for slot in cluster.slots if slot.kind == "ingress"]
        over_http = [HttpDoor(http, partial(getattr, slot, "http_url")) for slot in ingresses]
        doors: list[Sequence[Door]] = [[GrpcDoor(client) for client in clients], over_http]
        streams = Streams(doors[: 2 if ingresses else 1], work.requests, work.reference, options.at_once, options.seed)
        await stream_for(streams, 2.0)
        await _settled(cluster)
        first, descriptors = await _held_by_role(cluster), own.num_fds()
        preemptions = await _preemptions(clients)
        disturber = Disturber(cluster, options.seed, options.pause_seconds, options.most_lost)
        running = asyncio.create_task(streams.run())
        await disturber.run(options.rounds, options.roles)
        await _all_ready(cluster)
        streams.end()
        await running
        await http.aclose()  # idle connections of the clients are no leak of the ingress
        leaks = await _settled(cluster)
        leaks += _growth(await _held_by_role(cluster), first)
        if own.num_fds() > descriptors + 4 * MOST_NEW_DESCRIPTORS:
            leaks.append(f"the clients have {own.num_fds()} descriptors, {descriptors} at first")
        preemptions += await _preemptions(clients)
        for client in clients:
            await client.close()
        cluster.check()
    finally:
        await http.aclose()
        await cluster.stop()
    return ChaosReport(
        options.seed,
        round(time.monotonic() - begun, 1),
        by_role(disturber.counts),
        streams.results,
        preemptions,
        leaks,
        messages=dict(sum((link.counts for link in cluster.links), Counter[str]())),
        replaced=dict(Counter(role for role, _ in cluster.replacements.reasons)),
        replacement_seconds=percentiles(cluster.replacements.seconds),
    )


async def stream_for(streams: Streams, seconds: float) -> None:
    """Stream without faults, so that every connection is open and every process has its working memory."""
    asyncio.get_running_loop().call_later(seconds, streams.end)
    await streams.run()


async def _all_ready(cluster: ChaosCluster) -> None:
    """Return once every process serves and answers."""
    async with asyncio.timeout(SETTLE_SECONDS * 2):
        while True:
            try:
                for slot in cluster.slots:
                    await _held(slot)
                return
            except (ConnectionError, TimeoutError):
                await asyncio.sleep(0.1)


async def _settled(cluster: ChaosCluster) -> list[str]:
    """Wait until nothing is held for a client. Returns what is still held after `SETTLE_SECONDS`."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        left: list[str] = []
        for slot in cluster.slots:
            try:
                held = (await _held(slot))["held"]
            except (ConnectionError, TimeoutError) as error:
                left.append(f"{slot.name} does not answer: {error!r}")
            else:
                left += [f"{slot.name} holds {n} {what}" for what, n in held.items() if n and what != "tasks"]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.2)


async def _held(slot: Slot) -> dict[str, Any]:
    if slot.process is None or not slot.is_ready:
        raise ConnectionError("it is not serving")
    async with asyncio.timeout(10.0):
        return await slot.process.ask("held")


async def _held_by_role(cluster: ChaosCluster) -> dict[str, dict[str, int]]:
    """The most descriptors, bytes and tasks of any process of each role."""
    most: dict[str, dict[str, int]] = {}
    for slot in cluster.slots:
        answer = await _held(slot)
        values = {name: answer[name] for name in ("descriptors", "memory")} | {"tasks": answer["held"].get("tasks", 0)}
        known = most.setdefault(slot.kind, values)
        most[slot.kind] = {name: max(value, known[name]) for name, value in values.items()}
    return most


def _growth(last: dict[str, dict[str, int]], first: dict[str, dict[str, int]]) -> list[str]:
    bounds = {"descriptors": MOST_NEW_DESCRIPTORS, "memory": MOST_NEW_BYTES, "tasks": MOST_NEW_DESCRIPTORS}
    return [
        f"a {role} has {value} {name}, {first[role][name]} at first"
        for role, values in last.items()
        for name, value in values.items()
        if value > first[role][name] + bounds[name]
    ]


async def _preemptions(clients: Sequence[GenerationClient]) -> int:
    """Preemptions that the present coordinators counted. Every client asks all of them."""
    most = 0.0
    for client in clients:
        try:
            most = max(most, (await read_counts(client)).get("vllm:num_preemptions_total", 0.0))
        except PilotfishError:
            continue
    return int(most)


def limit_threads() -> None:
    """One thread per process: a tiny model gains nothing from more, and there are many processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
