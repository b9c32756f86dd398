"""Every drafting method for encoder-decoder targets: drafts change no token, and others are refused when they start."""

from __future__ import annotations

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.wire.generation_client import GenerationClient
from deploy.coordinator_server import fixed_address
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.models import tiny
from tests.support.translation.tiny_marian import FRENCH, marian_tokenizer
from workers.draft.registry import create
from workers.serve.configuration import load_configuration

TIMEOUT_SECONDS = 60.0
MOST = 20
METHODS: dict[str, dict[str, Any]] = {
    "early_exit": {"layers": 2},
    "lookahead": {"window": 3, "ngram": 3},
    "ngram": {},
    "recycling": {},
    "suffix": {},
}
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=sorted(tiny.ENCODER_DECODER_FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = marian_tokenizer(tmp_path_factory.mktemp(request.param))
    return tiny.save(tokenizer, tiny.ENCODER_DECODER_FAMILIES[request.param]())


def configure(directory: Path, method: str, settings: dict[str, Any]) -> Configuration:
    target: dict[str, Any] = {"path": str(directory), "device": "cpu", "compile": "off", "served_name": "tiny"}
    return load_configuration(
        {
            "target": target | {"kv": {"pool_bytes": 8 << 20}},
            "draft": {"method": method, "controller": "off", "max_nodes": 10, "max_depth": 5, method: settings},
            "server": {"grpc_port": 0, "http_port": 0},
        }
    )


async def answers(configuration: Configuration) -> tuple[Answers, int]:
    """Greedy and sampled answers to all sentences at once, and the number of drafted tokens."""
    async with LocalCluster(configuration) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address))
        drafted = 0

        async def one(text: str, temperature: float, seed: int) -> tuple[int, ...]:
            nonlocal drafted
            sampling = common_pb2.SamplingParameters(temperature=temperature, seed=seed)
            stopping = generation_pb2.StoppingCriteria(max_tokens=MOST, ignore_eos=True)
            message = generation_pb2.GenerateRequest(text=text, sampling=sampling, stopping=stopping)
            tokens: list[int] = []
            async for response in client.generate(message, TIMEOUT_SECONDS):
                tokens.extend(response.delta.token_ids)
                drafted += response.finished.usage.drafted_tokens
            return tuple(tokens)

        requests = product((0.0, 0.9), enumerate(FRENCH))
        found = await asyncio.gather(*(one(text, temperature, seed) for temperature, (seed, text) in requests))
        await client.close()
    return list(found), drafted


@pytest.fixture(scope="module")
def plain(directory: Path) -> Answers:
    """The answers of the target alone."""
    found, drafted = asyncio.run(answers(configure(directory, "none", {})))
    assert not drafted
    assert len(set(found[len(FRENCH) :])) == len(FRENCH)
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
async def test_drafts_change_no_token(directory: Path, plain: Answers, method: str) -> None:
    found, drafted = await answers(configure(directory, method, METHODS[method]))
    assert found == plain
    assert drafted > 0


@pytest.mark.parametrize("method", ["block", "blockwise", "eagle", "heads"])
def test_a_module_for_decoder_only_targets_is_refused_with_the_name_of_its_setting(
    directory: Path, tmp_path: Path, method: str
) -> None:
    configuration = load_configuration(
        {"target": {"path": str(directory)}, "draft": {"method": method, method: {"path": str(tmp_path)}}}
    )
    with pytest.raises(ConfigurationError, match=f"draft.method: {method} is refused for the encoder-decoder target"):
        create(configuration.draft, configuration.target)
