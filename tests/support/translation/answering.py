"""Answers of a cluster in this process to the tokenizer's French sentences, greedy and sampled, all at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import product

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.translation.tiny_marian import FRENCH

TIMEOUT_SECONDS = 60.0
MOST = 20
"""Tokens of each answer."""


@dataclass
class Translated:
    """The answers to all sentences: greedy ones, then sampled ones."""

    answers: list[tuple[int, ...]]
    drafted: int = 0
    accepted: int = 0


async def translate_all(configuration: Configuration) -> Translated:
    """Start the cluster, send all requests at once, and count their drafted tokens."""
    async with LocalCluster(configuration) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        found = Translated([])

        async def one(text: str, temperature: float, seed: int) -> tuple[int, ...]:
            sampling = common_pb2.SamplingParameters(temperature=temperature, seed=seed)
            stopping = generation_pb2.StoppingCriteria(max_tokens=MOST, ignore_eos=True)
            message = generation_pb2.GenerateRequest(text=text, sampling=sampling, stopping=stopping)
            tokens: list[int] = []
            async for response in client.generate(message, TIMEOUT_SECONDS):
                tokens.extend(response.delta.token_ids)
                found.drafted += response.finished.usage.drafted_tokens
                found.accepted += response.finished.usage.accepted_draft_tokens
            return tuple(tokens)

        requests = product((0.0, 0.9), enumerate(FRENCH))
        found.answers = list(await asyncio.gather(*(one(text, heat, seed) for heat, (seed, text) in requests)))
        await client.close()
    return found
