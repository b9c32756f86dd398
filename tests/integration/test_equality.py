"""What clients read is what the model alone would have written, token for token.

Whatever the drafter, the batch, the door and the number of ranks: greedy text equals `generate` of
`transformers` in float32, and sampled text with a seed equals a plain loop over the model's own
forward pass. Each answer is asked for twice over, alone and among seven others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config import Configuration
from deploy.local.local_cluster import LocalCluster
from tests.support.live_cluster import Ask, Server, ask_all
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.weights

METHODS = ("none", "ngram", "model")
ALONE_TOKENS = 10


def configure(target: Path, draft: Path, method: str, ranks: int) -> Configuration:
    drafting: dict[str, Any] = {"method": method, "max_nodes": 6, "max_depth": 3, "timeout_seconds": 60.0}
    drafting["controller"] = "off"  # guesses are verified whether they pay here or not
    if method == "model":
        drafting["model"] = {"path": str(draft), "device": "cpu", "kv": {"pool_bytes": 300 << 20}}
    return load_configuration(
        {
            "target": {
                "path": str(target),
                "served_name": "smollm2-135m-instruct",
                "device": "cpu",
                "tensor_parallel": ranks,
                "kv": {"pool_bytes": 300 << 20},
            },
            "draft": drafting,
            "scheduler": {"max_sequences": 8, "max_step_tokens": 128},
            "server": {"grpc_port": 0, "http_port": 0},
        }
    )


def shortened(expected: dict[Ask, tuple[int, ...]], count: int) -> dict[Ask, tuple[int, ...]]:
    """The same questions, answered in fewer tokens: an answer's beginning does not depend on its length."""
    return {replace(asked, max_tokens=count): answer[:count] for asked, answer in expected.items()}


async def check(server: Server, expected: dict[Ask, tuple[int, ...]], at_once: int) -> None:
    """Ask for every answer, `at_once` in flight, and compare token for token."""
    asks = list(expected)
    for asked, answer in zip(asks, await ask_all(server, asks, at_once), strict=True):
        assert answer == expected[asked], asked


@pytest.mark.parametrize("method", METHODS)
async def test_one_rank(
    method: str,
    target_directory: Path,
    draft_directory: Path,
    greedy: dict[Ask, tuple[int, ...]],
    sampled: dict[Ask, tuple[int, ...]],
) -> None:
    assert len(greedy) >= 20
    configuration = configure(target_directory, draft_directory, method, ranks=1)
    async with LocalCluster(configuration, http=True) as cluster:
        server = Server(cluster.grpc_address, cluster.http_url)
        for expected in (greedy, sampled):
            await check(server, shortened(expected, ALONE_TOKENS), at_once=1)
            await check(server, expected, at_once=8)
