"""A cluster in one process is for this process alone."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil

from deploy.local.local_cluster import LocalCluster
from deploy.network.listeners import listeners
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import tiny, tiny_tokenizer


async def test_it_listens_on_loopback_where_the_settings_of_a_server_say_otherwise(tmp_path: Path) -> None:
    """Commands that load the models themselves may read the file of a server that is open to the network."""
    model = tiny_tokenizer.byte_level(tiny.save(tmp_path / "model", tiny.llama(vocab_size=320)))
    configuration = tiny_cluster(model, {"method": "none"})
    everywhere = {"http_host": "0.0.0.0", "grpc_host": "0.0.0.0"}
    server = configuration.server.model_copy(update=everywhere)
    before = set(listeners([psutil.Process()]))
    async with LocalCluster(configuration.model_copy(update={"server": server}), http=True) as cluster:
        found = set(listeners([psutil.Process()])) - before
        ports = {int(address.rpartition(":")[2]) for address in (cluster.http_url, cluster.grpc_address)}
        assert ports <= {one.port for one in found}
        assert all(one.is_loopback for one in found)
        async with httpx.AsyncClient(base_url=cluster.http_url) as client:
            assert (await client.get("/ready")).status_code == 200
