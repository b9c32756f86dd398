"""Measures routing by prefix and load against round robin: two replicas, requests that share long beginnings."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

from cluster.ingress.client import ServiceClient
from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.bench.options import Options
from tests.bench.report import heading, percentile, ratios, spread, table
from tests.support.clusters.coordinators import coordinator

REPLICAS = 2
GROUPS, SHARED_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 8, 384, 24, 4
REQUESTS, QUICK_REQUESTS = 96, 16
IN_FLIGHT = 3
POOL_MIB = 96
"""A pool of each replica that holds 5 of the 8 beginnings, in float32."""
TIMEOUT_SECONDS = 600.0
Generate = Callable[[generation_pb2.GenerateRequest, float], AsyncGenerator[generation_pb2.GenerateResponse, None]]


@dataclass
class Measured:
    """One policy's measurements, one entry per repetition."""

    hit_rates: list[float] = field(default_factory=list)
    """Share of the prompt tokens whose keys and values were stored."""
    medians: list[float] = field(default_factory=list)
    """Median time to the first token, in milliseconds."""
    tails: list[float] = field(default_factory=list)
    """99th percentile of it, in milliseconds."""
    shares: list[float] = field(default_factory=list)
    """Largest share of the prompt tokens at one replica."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Routing: prefix affinity and load against round robin")
    asyncio.run(_measure(options))


async def _measure(options: Options) -> None:
    results = {"round robin": Measured(), "routed": Measured()}
    configuration = options.configuration(
        "draft.method=none", "target.threads=1", f"target.kv.pool_bytes={POOL_MIB << 20}"
    )
    async with AsyncExitStack() as stack:
        clusters = [await stack.enter_async_context(LocalCluster(configuration)) for _ in range(REPLICAS)]
        clients = [GenerationClient(fixed_address(cluster.grpc_address)) for cluster in clusters]
        for client in clients:
            stack.push_async_callback(client.close)
        views = [coordinator(cluster.grpc_address, cluster.grpc_address) for cluster in clusters]
        for repeat in range(options.repeats):
            router = Router(lambda: views, lambda address: GenerationClient(fixed_address(address)))
            turns = itertools.cycle(clients)
            policies: dict[str, Generate] = {
                "round robin": lambda request, seconds, turns=turns: next(turns).generate(request, seconds),
                "routed": router.generate,
            }
            for name, generate in policies.items():
                await _run(options, f"{name}-{repeat}", generate, clients, results[name])
            await router.close()
    routed, plain = results["routed"], results["round robin"]
    table(
        ("policy", "prefix hit rate", "first token p50, ms", "first token p99, ms", "largest share at one replica"),
        [
            [
                name,
                spread(one.hit_rates),
                spread(one.medians, 0),
                spread(one.tails, 0),
                spread(one.shares),
            ]
            for name, one in results.items()
        ]
        + [
            [
                "routed ÷ round robin",
                spread(ratios(routed.hit_rates, plain.hit_rates)),
                spread(ratios(routed.medians, plain.medians)),
                spread(ratios(routed.tails, plain.tails)),
                "",
            ]
        ],
    )


async def _run(
    options: Options, salt: str, generate: Generate, clients: Sequence[ServiceClient], into: Measured
) -> None:
    """Send all requests, a few at a time. The salt separates them from what is stored of other runs."""
    before = [await _prefix_tokens(client) for client in clients]
    draw = random.Random(7)
    slots = asyncio.Semaphore(IN_FLIGHT)

    async def one(number: int) -> float:
        shared = options.long_prompt(SHARED_TOKENS, draw.randrange(GROUPS))
        own = options.long_prompt(OWN_TOKENS, 1000 + number)
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=[*shared, *own]),
            sampling=common_pb2.SamplingParameters(temperature=0.0, seed=number),
            stopping=generation_pb2.StoppingCriteria(max_tokens=ANSWER_TOKENS, ignore_eos=True),
            cache_salt=salt,
        )
        async with slots:
            return await _first_token_seconds(generate, request)

    requests: list[Awaitable[float]] = [one(number) for number in range(QUICK_REQUESTS if options.quick else REQUESTS)]
    seconds = await asyncio.gather(*requests)
    after = [await _prefix_tokens(client) for client in clients]
    hits = [late[0] - early[0] for late, early in zip(after, before, strict=True)]
    queries = [late[1] - early[1] for late, early in zip(after, before, strict=True)]
    into.hit_rates.append(sum(hits) / sum(queries))
    into.shares.append(max(queries) / sum(queries))
    into.medians.append(statistics.median(seconds) * 1e3)
    into.tails.append(percentile(seconds, 0.99) * 1e3)


async def _first_token_seconds(generate: Generate, request: generation_pb2.GenerateRequest) -> float:
    begun, first = time.perf_counter(), 0.0
    async with aclosing(generate(request, TIMEOUT_SECONDS)) as responses:
        async for response in responses:
            if not first and response.HasField("delta"):
                first = time.perf_counter() - begun
    return first


async def _prefix_tokens(client: ServiceClient) -> tuple[float, float]:
    """Prompt tokens that were found stored at one replica, and all that were looked up."""
    exposition, _ = await client.metrics()
    values = {"hits": 0.0, "queries": 0.0}
    for line in exposition.decode().splitlines():
        for name in values:
            if line.startswith(f"vllm:prefix_cache_{name}_total{{"):
                values[name] += float(line.rpartition(" ")[2])
    return values["hits"], values["queries"]
