"""The wheels, installed into an environment of their own: serving needs none of the other distributions.

Heavy dependencies come from this environment; Pilotfish itself does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from venv import EnvBuilder

import httpx
import pytest

from workers.serve.node import free_port

pytestmark = [pytest.mark.ray, pytest.mark.weights]

ROOT = Path(__file__).resolve().parents[2]
MAX_WHEEL_BYTES = 2 << 20
"""Largest wheel for serving. It has about 1 MB."""
READY_SECONDS = 240.0
DISTRIBUTIONS = {
    "pilotfish_client": "protos",
    "pilotfish": ".",
    "pilotfish_bench": "deploy/bench",
    "pilotfish_distill": "deploy/distillation",
    "pilotfish_simulate": "deploy/simulation",
    "pilotfish_drafts": "deploy/drafts",
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / folder for folder in DISTRIBUTIONS.values()]
    pip(sys.executable, "wheel", "-q", "--no-deps", "-w", str(directory), *map(str, sources))
    return {wheel.name.partition("-")[0]: wheel for wheel in directory.glob("*.whl")}


@pytest.fixture(scope="module")
def lean(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel for serving, and the client that it depends on."""
    home = tmp_path_factory.mktemp("lean")
    EnvBuilder(with_pip=True).create(home)
    inside = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    (Path(inside) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip(
        home / "bin" / "python",
        "install",
        "-q",
        "--no-deps",
        *(str(wheels[one]) for one in ("pilotfish_client", "pilotfish")),
    )
    return home / "bin"


def pip(python: str | Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(lean: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [lean / "pilotfish", *arguments]
    return subprocess.run(command, cwd=lean, env=environment(), capture_output=True, text=True, check=False)


def test_no_file_is_in_two_wheels_and_the_one_for_serving_is_small(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == DISTRIBUTIONS.keys()
    files = [name for wheel in wheels.values() for name in zipfile.ZipFile(wheel).namelist()]
    assert len(files) == len(set(files))
    assert wheels["pilotfish"].stat().st_size < MAX_WHEEL_BYTES
    assert {"deploy/bench/commands.py", "deploy/simulation/commands.py", "deploy/distillation/command.py"} < set(files)
    assert {"workers/distill/train.py", "deploy/drafts/smollm2-135m-eagle/model.safetensors"} < set(files)


@pytest.fixture
def address(lean: Path, tmp_path: Path) -> Iterator[str]:
    http, grpc = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [lean / "pilotfish", "serve", "--set", f"server.http_port={http}", "--set", f"server.grpc_port={grpc}"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{http}"
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    print((tmp_path / "log").read_text())


def test_the_wheel_for_serving_serves_the_packaged_model(lean: Path, address: str) -> None:
    found = subprocess.run(
        [lean / "python", "-c", "import deploy; print(deploy.__file__)"],
        cwd=lean,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(lean.parent)

    def ready() -> bool:
        try:
            return httpx.get(f"{address}/health").status_code == 200
        except httpx.TransportError:
            return False

    ends = time.monotonic() + READY_SECONDS
    while not ready():
        assert time.monotonic() < ends, "the server is not ready"
        time.sleep(0.5)
    body = {"model": "smollm2-135m-instruct", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60.0).raise_for_status().json()
    assert "Paris" in answer["choices"][0]["text"]


def test_the_other_commands_say_what_to_install(lean: Path) -> None:
    listed = run(lean, "--help")
    assert listed.returncode == 0 and "serve" in listed.stdout
    for command in ("bench", "distill", "simulate"):
        refused = run(lean, command, "--anything")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr == f"pilotfish: {command}: not installed; run `pip install 'pilotfish[{command}]'`\n"


def test_each_further_wheel_adds_its_command(lean: Path, wheels: dict[str, Path]) -> None:
    """This test installs into the shared environment, so it is the last one of the file."""
    further = [str(wheel) for name, wheel in wheels.items() if name not in ("pilotfish", "pilotfish_client")]
    pip(lean / "python", "install", "-q", "--no-deps", *further)
    for command in ("bench", "distill", "simulate"):
        shown = run(lean, command, "--help")
        assert shown.returncode == 0 and "Usage" in shown.stdout, shown.stderr
    ended = run(lean, "simulate", "faults", "--schedules", "2", "--workers", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "smollm2-135m-table" in run(lean, "doctor").stdout
