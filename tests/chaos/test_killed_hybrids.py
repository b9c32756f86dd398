"""A rank of a hybrid model is killed in the middle of its answers. The texts are those of `transformers`.

The states of its recurrent layers are gone with the process: the next one computes them again from committed tokens.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.core.errors import NotReady
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.implied_settings import with_implied_settings
from pilotfish.v1 import common_pb2, generation_pb2
from tests.chaos.cluster import ChaosCluster
from tests.soak.watch import read_counts
from tests.support.deadline import deadline
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import tiny_tokenizer
from tests.support.models.hybrids import KINDS, save_hybrid
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

VOCABULARY, TOKENS, SECONDS = 320, 100, 240.0
PHRASE = [40, 41, 42, 43, 44, 45, 46]
REPEATED = 77
KILLED_AFTER = 12
"""Tokens of the first answer before the kill."""


def request(prompt: list[int], bias: dict[int, float]) -> generation_pb2.GenerateRequest:
    """A greedy request."""
    biases = [common_pb2.LogitBias(token_id=token, bias=value) for token, value in bias.items()]
    return generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(temperature=0.0, logit_bias=biases),
        stopping=generation_pb2.StoppingCriteria(max_tokens=TOKENS, ignore_eos=True),
    )


@pytest.mark.parametrize(
    ("family", "killed"),
    [*((family, "target") for family in (*KINDS, "granitemoehybrid", "qwen3_5_text")), ("qwen3_next", "rank")],
)
async def test_a_killed_rank_changes_no_text(family: str, killed: str, tmp_path: Path) -> None:
    case = save_hybrid(tiny_tokenizer.byte_level(tmp_path / "target"), family, vocab_size=VOCABULARY)
    target = {"path": str(case.directory), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    draft = {"method": "ngram", "max_nodes": 6, "max_depth": 4, "controller": "off"}
    configuration = load_configuration(
        {
            "target": target | {"kv": {"pool_bytes": 8 << 20, "block_size": 4}},
            "draft": draft,
            "scheduler": {"max_sequences": 8},
            "server": {"grpc_port": 0, "http_port": 0},
        }
    )
    prompts = [[50 + number, *PHRASE, 60 + number, *PHRASE[:3]] for number in range(2)]
    wanted = [*(case.reference(prompt, TOKENS) for prompt in prompts), [REPEATED] * TOKENS]
    sent = [*(request(prompt, {}) for prompt in prompts), request(prompts[0], {REPEATED: 100.0})]
    cluster = ChaosCluster(
        with_implied_settings(configuration), (2 if killed == "rank" else 1,), 0, 0, tmp_path, seed=0
    )
    answers: list[list[int]] = [[] for _ in sent]
    is_begun = asyncio.Event()

    async def read(client: GenerationClient, index: int) -> None:
        while not answers[index]:
            with suppress(NotReady):  # the coordinator has not met the target yet
                await stream(client, index)
            await asyncio.sleep(0.1)

    async def stream(client: GenerationClient, index: int) -> None:
        async for response in client.generate(sent[index], SECONDS):
            answers[index] += response.delta.token_ids
            if index == 0 and len(answers[0]) >= KILLED_AFTER:
                is_begun.set()

    async with deadline(SECONDS):
        await cluster.start()
        client = GenerationClient(fixed_address(cluster.doors[0].address))
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(sent)):
                    group.create_task(read(client, index))
                await is_begun.wait()
                (victim,) = (one for one in cluster.victims() if one.kind == killed)
                victim.signal(signal.SIGKILL)
                assert all(len(answer) < TOKENS for answer in answers[:2]), "the answers were complete before the kill"
            counts = await read_counts(client)
        finally:
            await client.close()
            await cluster.stop()
    assert answers == wanted
    (noticed,) = (kind for kind, _ in cluster.replacements.reasons)
    assert noticed in {killed, "target"}, "rank 0 may report its lost peer before the owner looks at that process"
    assert counts["pilotfish:target_replays_total"] > 0
    assert counts["vllm:spec_decode_num_accepted_tokens_total"] > 0
