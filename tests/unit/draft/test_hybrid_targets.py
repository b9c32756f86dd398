"""A whole cluster with a hybrid target: drafts, neighbours and preemption change no token, and forks are right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.soak.watch import read_counts
from tests.support.deadline import deadline
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.hybrids import save_hybrid
from tests.support.models.model_cases import ModelCase
from tests.support.slow import slow_but
from tests.unit.draft.contract.methods import VOCABULARY, Directories, values
from tests.unit.draft.contract.test_streams import BIAS, PHRASE, Answer, answer, parameters, request, serving
from workers.serve.configuration import load_configuration

TOKENS = 50
SECONDS = 120.0
CASES = [
    *(("lfm2", method) for method in ("ngram", "suffix+recycling", "model")),
    ("granitemoehybrid", "eagle"),
    ("qwen3_next", "suffix+recycling"),
    ("falcon_h1", "ngram"),
]
"""Families, and what drafts for them. An EAGLE head reads hidden states of the target."""

Save = Callable[[str], ModelCase]
REPEATED_TOKENS = 8 + 12
"""Tokens in full blocks before the last token of the first two prompts."""


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Makes the model of a family, once."""

    def made(family: str) -> ModelCase:
        directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp(family) / "target")
        return save_hybrid(directory, family, vocab_size=VOCABULARY)

    return cache(made)


@pytest.fixture(scope="module")
def plain(save: Save, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Answer]]:
    """The answers of a family without drafts."""

    def answered(family: str) -> list[Answer]:
        with ThreadPoolExecutor(1) as thread:  # beside the loop of a test
            run = answers(save(family), "none", tmp_path_factory.mktemp("plain"))
            return thread.submit(asyncio.run, run).result()

    return cache(answered)


REQUESTS = [
    *(request(number, (), parameters(temperature=0.0), max_tokens=TOKENS) for number in range(3)),
    *(request(number, (), parameters(temperature=0.9, seed=number), max_tokens=TOKENS) for number in range(3, 6)),
    request(6, (), parameters(temperature=0.0, logit_bias=BIAS), max_tokens=TOKENS),
    request(7, (), parameters(temperature=0.9, seed=3, logit_bias=BIAS), max_tokens=TOKENS),
]
"""Greedy and sampled ones. The last two repeat one token for ever, so that drafts are accepted."""


async def answers(
    case: ModelCase, method: str, others: Path, preempted: list[float] | None = None, **kv: int
) -> list[Answer]:
    """The answers to all requests, which are sent at once; those to the first two are the same alone.

    `preempted` receives how many sequences were preempted.
    """
    draft = tiny.save(others / "draft", tiny.llama(vocab_size=VOCABULARY)) if method == "model" else others
    chosen = values(method, Directories(case.directory, draft, others), max_nodes=6, max_depth=4, timeout_seconds=30.0)
    chosen["target"]["kv"] |= kv
    async with (
        deadline(SECONDS),
        LocalCluster(load_configuration(chosen)) as cluster,
        GenerationClient(fixed_address(cluster.grpc_address)) as client,
    ):
        alone = [await answer(client, message) for message in REQUESTS[:2]]
        before = await read_counts(client)
        together = list(await asyncio.gather(*(answer(client, message) for message in REQUESTS)))
        assert [one.tokens for one in alone] == [one.tokens for one in together[:2]]
        name = "vllm:prefix_cache_hits_total"
        assert (await read_counts(client))[name] - before[name] >= REPEATED_TOKENS
        if preempted is not None:
            preempted.append((await read_counts(client))["vllm:num_preemptions_total"])
        return together


@pytest.mark.parametrize("family_and_method", slow_but(CASES[:1], CASES), ids="-".join)
async def test_drafts_change_no_token(
    family_and_method: tuple[str, str], save: Save, plain: Callable[[str], list[Answer]], tmp_path: Path
) -> None:
    family, method = family_and_method
    case, expected = save(family), plain(family)
    for message, one in zip(REQUESTS[:3], expected, strict=False):
        assert list(one.tokens) == case.reference(message.token_ids.ids, TOKENS)
        assert len(set(one.tokens)) > 3
        assert one.drafted == 0
    found = await answers(case, method, tmp_path)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert sum(one.drafted for one in found) > sum(one.accepted for one in found) > 0


@pytest.mark.slow
async def test_preempted_sequences_are_computed_again(tmp_path: Path) -> None:
    preempted: list[float] = []
    directory = tiny_tokenizer.byte_level(tmp_path / "target")
    case = save_hybrid(directory, "lfm2", vocab_size=VOCABULARY, hidden_size=256, num_key_value_heads=4)
    expected = await answers(case, "none", tmp_path)
    found = await answers(case, "ngram", tmp_path, preempted, pool_bytes=1 << 20)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert preempted[0] > 0


@pytest.mark.slow
async def test_beams_and_several_answers_are_those_of_transformers(save: Save) -> None:
    case, prompt = save("lfm2"), [50, *PHRASE]
    message = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        stopping=generation_pb2.StoppingCriteria(max_tokens=12, ignore_eos=True),
        n=3,
        best_of=3,
        beam_search=generation_pb2.BeamSearch(length_penalty=1.0),
    )
    found: dict[int, list[int]] = {index: [] for index in range(3)}
    async with serving("none", Directories(case.directory, case.directory, case.directory)) as client:
        async for response in client.generate(message, SECONDS):
            found[response.index] += response.delta.token_ids
        several = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingCriteria(max_tokens=12, ignore_eos=True),
            n=2,
        )
        forked: dict[int, list[int]] = {0: [], 1: []}
        async for response in client.generate(several, SECONDS):
            forked[response.index] += response.delta.token_ids
    assert forked[0] == forked[1] == case.reference(prompt, 12)
    model: Any = AutoModelForCausalLM.from_pretrained(case.directory, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([prompt]),
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=12,
        min_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    assert [found[index] for index in range(3)] == expected[:, len(prompt) :].tolist()
