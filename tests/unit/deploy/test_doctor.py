"""`pilotfish doctor` names every problem with a remedy, and what listens where."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.wire.peer_access import OPEN, PeerAccess
from deploy.doctor.environment import (
    folder_finding,
    gpu_finding,
    package_finding,
    processor,
    prompt_log_findings,
    python_finding,
    shared_memory_finding,
)
from deploy.doctor.finding import Finding
from deploy.doctor.models import model_finding, model_findings
from deploy.doctor.network import Exposure, exposures, network_findings
from deploy.network.cluster_token import draw_token
from deploy.network.listeners import Listener, listeners
from deploy.network.probe import Demand, probe
from deploy.settings import load_settings
from tests.support.fakes.echo_workers import EchoEngine
from tests.support.models import tiny
from workers.serve.worker_server import host_target

CPU = """processor : 0
model name : Some CPU
flags : fpu sse2 avx2 avx512f amx_bf16

processor : 1
model name : Some CPU
flags : fpu sse2 avx2 avx512f amx_bf16
"""
LEASE = "/pilotfish.v1.LeaseService/Renew"


def test_a_finding_is_a_problem_exactly_if_it_has_a_remedy() -> None:
    assert not Finding("a", "b").is_problem
    assert str(Finding("a", "b", "do c")) == "a: b; do c"


def test_old_software_and_little_shared_memory_are_problems() -> None:
    assert python_finding((3, 10)).remedy == "install Python 3.11 or newer"
    assert not python_finding((3, 12)).is_problem
    assert package_finding("no-such-package").remedy == "run `make setup`"
    assert not package_finding("grpcio").is_problem
    assert shared_memory_finding(64 << 20).is_problem
    assert not shared_memory_finding(1 << 30).is_problem


def test_gpus_that_torch_cannot_use_are_a_problem_and_no_gpu_is_none() -> None:
    assert gpu_finding(0, 0, has_device=True).is_problem
    assert not gpu_finding(0, 0, has_device=False).is_problem
    assert "2, at least 8.0 GiB" in gpu_finding(2, 8 << 30, has_device=True).found


def test_the_processor_is_named_with_the_instruction_sets_that_kernels_use() -> None:
    assert processor(CPU) == "Some CPU (avx2, avx512f, amx_bf16)"
    assert "no vector instructions known" in processor("")


def test_a_folder_of_code_that_others_may_write_to_is_a_problem(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert not folder_finding(tmp_path).is_problem
    tmp_path.chmod(0o775)
    assert "chmod go-w" in str(folder_finding(tmp_path).remedy)


def test_a_directory_for_prompts_that_others_may_write_to_is_a_problem(tmp_path: Path) -> None:
    assert not list(prompt_log_findings(DraftSection()))
    draft = DraftSection(prompt_log_directory=str(tmp_path))
    tmp_path.chmod(0o755)
    assert list(prompt_log_findings(draft)) == [Finding("draft.prompt_log_directory", str(tmp_path))]
    tmp_path.chmod(0o775)
    (found,) = prompt_log_findings(draft)
    assert found.is_problem
    assert "chmod go-w" in found.found


@pytest.mark.parametrize("path", ["./nothing", "no-such-name", "file.gguf"])
def test_a_model_that_is_not_there_is_a_problem(path: str, tmp_path: Path) -> None:
    found = model_finding("target.path", path, tmp_path)
    assert found.is_problem
    assert path in found.found


def test_models_are_found_in_directories_packages_and_the_cache(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    assert model_finding("target.path", str(directory), tmp_path).is_problem
    for name in ("config.json", "model.safetensors"):
        (directory / name).touch()
    assert model_finding("target.path", str(directory), tmp_path).is_problem
    tiny.save(directory, tiny.llama())
    assert not model_finding("target.path", str(directory), tmp_path).is_problem
    assert not model_finding("target.path", f"{directory}@x10", tmp_path).is_problem
    assert "in the cache" in model_finding("target.path", "model", tmp_path).found
    name = "smollm2-135m-instruct"
    (tmp_path / "stored" / name).mkdir(parents=True)
    (tmp_path / "stored" / name / "config.json").write_text("{}")
    assert f"in the cache {tmp_path / 'stored'}" in model_finding("target.path", name, tmp_path, stored=True).found
    assert "in the cache" not in model_finding("target.path", name, tmp_path).found
    found = next(model_findings(load_settings("cpu", environment={}).configuration, tmp_path))
    assert f"in the cache {tmp_path / 'stored'}" in found.found
    assert not model_finding("draft.model.path", "smollm2-135m-draft", tmp_path).is_problem


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("::ffff:192.0.2.1", False),
    ],
)
def test_loopback_is_told_from_other_addresses(host: str, is_loopback: bool) -> None:
    assert Listener(1, "raylet", host, 80).is_loopback == is_loopback


@pytest.fixture
def plain_listener() -> Iterator[int]:
    """A port of this process behind which no gRPC server is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_listeners_of_a_process_are_found(plain_listener: int) -> None:
    found = listeners([psutil.Process()])
    assert [listener.host for listener in found if listener.port == plain_listener] == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("access", "expected"), [(PeerAccess(draw_token()), Demand.CREDENTIAL), (OPEN, Demand.NOTHING)], ids=str
)
async def test_a_probe_tells_whether_a_worker_demands_its_token(access: PeerAccess, expected: Demand) -> None:
    async with host_target("127.0.0.1", EchoEngine(), access) as host:
        port = int(host.address.rpartition(":")[2])
        assert await asyncio.to_thread(probe, "127.0.0.1", port, LEASE) is expected


async def test_an_open_worker_is_a_problem_and_a_closed_one_is_none() -> None:
    async with (
        host_target("127.0.0.1", EchoEngine()) as open_host,
        host_target("127.0.0.1", EchoEngine(), PeerAccess(draw_token())) as closed_host,
    ):
        open_port, closed_port = (int(host.address.rpartition(":")[2]) for host in (open_host, closed_host))
        ours = [one for one in listeners([psutil.Process()]) if one.port in (open_port, closed_port)]
        found = await asyncio.to_thread(exposures, ours)
    problems = [finding for finding in network_findings(found) if finding.is_problem]
    assert len(ours) == 2
    assert [problem.found.endswith(f"{open_port} demands no credential") for problem in problems] == [True]


def test_the_public_api_is_a_problem_only_beyond_loopback() -> None:
    def problems(host: str) -> int:
        exposure = Exposure(Listener(1, "ray::ServeReplica", host, 9000), Demand.NOTHING, is_public=True)
        return sum(finding.is_problem for finding in network_findings([exposure]))

    assert (problems("127.0.0.1"), problems("0.0.0.0"), problems("192.0.2.1")) == (0, 1, 1)


def test_the_summary_says_how_many_open_ports_demand_a_credential() -> None:
    found = [
        Exposure(Listener(1, "ray::ServeReplica", host, 9000), demand, is_public=False)
        for host, demand in (
            ("127.0.0.1", Demand.NOTHING),
            ("0.0.0.0", Demand.CREDENTIAL),
            ("192.0.2.1", Demand.CREDENTIAL),
            ("192.0.2.1", Demand.UNKNOWN),
        )
    ]
    said = [next(network_findings(some)).found for some in (found, found[:1])]
    assert said == [
        "4 ports; other machines reach 3, and 2 of these demand a credential",
        "1 port; other machines reach none",
    ]


@pytest.mark.slow
def test_the_command_prints_json_and_exits_with_1_on_a_problem(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "doctor", "--json", "--set", f"target.path={tmp_path}"]
    command += ["--set", "target.span_nodes=true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["problems"] >= 1
    assert {"subject": "target.path", "found": f"{tmp_path}: no config.json"}.items() <= next(
        finding for finding in report["findings"] if finding["subject"] == "target.path"
    ).items()
    assert {"Python", "torch", "ray", "cores", "memory", "GPUs", "target.span_nodes", "CPU kernels", "listeners"} <= {
        finding["subject"] for finding in report["findings"]
    }
    for listener in report["listeners"]:
        assert {"pid", "process", "host", "port", "loopback", "demands"} <= set(listener)


def test_a_port_at_which_nothing_listens_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert probe("127.0.0.1", port, LEASE) is Demand.UNKNOWN


def test_a_server_that_is_not_grpc_is_sent_nothing() -> None:
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            connection, _ = server.accept()
            with connection:
                received.append(connection.recv(100))

        listening = threading.Thread(target=listen)
        listening.start()
        assert probe("127.0.0.1", server.getsockname()[1], LEASE) is Demand.UNKNOWN
        listening.join()
    assert received == [b""]
