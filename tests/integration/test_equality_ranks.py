"""The same equality under Ray Serve with three tensor-parallel ranks, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.running import ServeCluster, with_ports
from deploy.settings import Settings
from tests.integration.serving import Ask, Server, ask_all
from tests.integration.test_equality import METHODS, configure

pytestmark = [pytest.mark.weights, pytest.mark.ray]

RANKS = 3
ALONE_TOKENS = 6
TOGETHER_TOKENS = 12


@pytest.fixture(scope="module")
def cluster(
    target_directory: Path, draft_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeCluster]:
    configuration = with_ports(configure(target_directory, draft_directory, METHODS[0], RANKS))
    settings = Settings(configuration, tmp_path_factory.mktemp("cache"))
    with ServeCluster(settings, lambda _: None) as running:
        yield running


def shortened(expected: dict[Ask, tuple[int, ...]], count: int) -> dict[Ask, tuple[int, ...]]:
    """The same questions, answered in fewer tokens: an answer's beginning does not depend on its length."""
    return {
        Ask(asked.prompt, count, asked.temperature, asked.top_p, asked.seed): answer[:count]
        for asked, answer in expected.items()
    }


@pytest.mark.parametrize("method", METHODS)
async def test_three_ranks(
    method: str,
    cluster: ServeCluster,
    target_directory: Path,
    draft_directory: Path,
    greedy: dict[Ask, tuple[int, ...]],
    sampled: dict[Ask, tuple[int, ...]],
) -> None:
    if method != METHODS[0]:
        drafting = configure(target_directory, draft_directory, method, RANKS).draft
        cluster.redeploy(cluster.configuration.model_copy(update={"draft": drafting}))
    server = Server(cluster.grpc_address, cluster.http_url)
    for expected in (greedy, sampled):
        alone, together = shortened(expected, ALONE_TOKENS), shortened(expected, TOGETHER_TOKENS)
        answers = [*await ask_all(server, list(alone), 1), *await ask_all(server, list(together), 8)]
        for asked, answer in zip([*alone, *together], answers, strict=True):
            assert answer == (alone | together)[asked], asked
