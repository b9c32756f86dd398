"""What a running cluster shows to the network: loopback listeners only, and nothing without a credential."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cluster.core.config.sections import Configuration
from cluster.wire.peer_access import ClusterToken, Metadata, PeerAccess
from deploy.doctor.network import LEASE_METHOD, REPLICA_METHOD
from deploy.network.cluster_token import draw_token
from deploy.network.listeners import Listener, listeners
from deploy.network.probe import RAY_METHOD, Demand, probe
from deploy.settings import load_settings
from tests.support.clusters.serve_process import ServeProcess
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.ray

RANKS = 3


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text(draw_token().text)
    return file


@pytest.fixture(scope="module")
def configuration(token_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Configuration:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=1024))
    overrides = {
        "target.path": str(tiny_tokenizer.byte_level(directory)),
        "target.device": "cpu",
        "target.tensor_parallel": RANKS,
        "target.kv.pool_bytes": 8 << 20,
        "draft.placement": "drafter",
        "cluster.token_file": str(token_file),
        "server.http_port": 0,
        "server.grpc_port": 0,
        "server.start_timeout_seconds": 120.0,
    }
    return load_configuration({}, overrides)


@pytest.fixture(scope="module")
def cluster(configuration: Configuration) -> Iterator[ServeProcess]:
    """A cluster of its own, so that its token is the one in the file."""
    with ServeProcess(load_settings().cache_directory) as process:
        process.start(configuration)
        yield process


@pytest.fixture(scope="module")
def open_ports(cluster: ServeProcess) -> tuple[Listener, ...]:
    return listeners(cluster.processes)


def test_everything_listens_on_loopback_except_the_replica_servers_of_ray_serve(
    open_ports: tuple[Listener, ...],
) -> None:
    assert len(open_ports) > 10, "the processes of the cluster were not found"
    outside = [listener for listener in open_ports if not listener.is_loopback]
    assert {listener.process.partition(":pilotfish")[0] for listener in outside} <= {"ray::ServeReplica"}, outside
    assert len({listener.pid for listener in outside}) == len(outside), "a replica listens outside more than once"
    demands = [probe("127.0.0.1", listener.port, REPLICA_METHOD) for listener in outside]
    assert demands == [Demand.CREDENTIAL] * len(outside)


def test_internal_services_and_ray_demand_a_credential(open_ports: tuple[Listener, ...], token_file: Path) -> None:
    access = PeerAccess(ClusterToken(token_file.read_text()))

    def demand_of(listener: Listener, metadata: Metadata = ()) -> Demand:
        return probe("127.0.0.1", listener.port, LEASE_METHOD, metadata=metadata)

    with ThreadPoolExecutor(len(open_ports)) as at_once:  # a server that does not speak first is waited for
        demands = at_once.map(lambda listener: demand_of(listener, access.metadata()), open_ports)
        internal = [one for one, demand in zip(open_ports, demands, strict=True) if demand is Demand.NOTHING]
    assert {listener.process.rpartition(":")[2] for listener in internal} == {"FirstRank", "Draft"}
    assert all(demand_of(listener) is Demand.CREDENTIAL for listener in internal)
    control = [listener for listener in open_ports if listener.process == "gcs_server"]
    assert [probe("127.0.0.1", listener.port, RAY_METHOD) for listener in control] == [Demand.CREDENTIAL]


def test_the_token_is_in_no_command_line_and_no_log(cluster: ServeProcess, token_file: Path) -> None:
    token = token_file.read_text()
    assert len(cluster.processes) > 8
    for process in cluster.processes:
        try:
            assert token not in " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
    logs = [file for file in Path("/tmp/ray/session_latest").resolve().glob("logs/**/*") if file.is_file()]  # noqa: S108
    assert len(logs) > 5
    assert not [file for file in logs if token.encode() in file.read_bytes()]
