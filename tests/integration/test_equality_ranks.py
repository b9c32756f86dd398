"""The same equality under Ray Serve with three tensor-parallel ranks, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from deploy.ray.serve_cluster import ServeCluster, with_ports
from deploy.settings import Settings
from tests.integration.test_equality import METHODS, check, configure, shortened
from tests.support.live_cluster import Ask, Server

pytestmark = [pytest.mark.weights, pytest.mark.ray]

RANKS = 3
ALONE_TOKENS = 3
ALONE = 4
"""Answers that are asked for alone as well."""
TOGETHER_TOKENS = 8


@pytest.fixture(scope="module")
def cluster(
    target_directory: Path, draft_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServeCluster]:
    configuration = with_ports(configure(target_directory, draft_directory, METHODS[0], RANKS))
    settings = Settings(configuration, tmp_path_factory.mktemp("cache"))
    with ServeCluster(settings, lambda _: None) as running:
        yield running


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
        alone = dict(islice(expected.items(), ALONE))
        await check(server, shortened(alone, ALONE_TOKENS), at_once=1)
        await check(server, shortened(expected, TOGETHER_TOKENS), at_once=8)
