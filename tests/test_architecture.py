"""The direction of imports holds, and the contracts that say so would notice if it did not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GIVEN = {"cluster", "workers", "protos", "deploy", "tests", "helm"}
FAULTS = {
    "the core imports the wire": ("cluster/core/fault.py", "import cluster.wire", "The rooms, high to low"),
    "a worker imports the coordinator": (
        "workers/draft/fault.py",
        "import cluster.coordinator",
        "Workers know the core",
    ),
    "a sibling imports its sibling": ("workers/sampling/fault.py", "import workers.kv", "The rooms, high to low"),
    "the control plane imports torch": (
        "cluster/ingress/fault.py",
        "import torch",
        "The control plane computes nothing",
    ),
    "the control plane imports Ray": (
        "cluster/coordinator/fault.py",
        "import ray",
        "The control plane computes nothing",
    ),
    "the data plane imports deploy": ("workers/serve/fault.py", "import deploy", "The rooms, high to low"),
    "the target imports Ray": ("workers/verify/fault.py", "import ray", "Ray places; it never carries a token"),
    "the core reads the clock": ("cluster/core/fault.py", "import time", "The core is pure"),
    "the loop speaks protobuf": ("cluster/coordinator/fault.py", "import pilotfish.v1", "Protobuf stays in the wire"),
}


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--config", "pyproject.toml", "--no-cache"]
    environment = os.environ | {"PYTHONPATH": str(directory), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("house")
    ignored = shutil.ignore_patterns("__pycache__")
    for source in ("cluster", "workers", "deploy", "protos/pilotfish"):
        shutil.copytree(ROOT / source, directory / Path(source).name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def test_the_contracts_hold(house: Path) -> None:
    outcome = lint(house)
    assert outcome.returncode == 0, outcome.stdout
    assert " 0 broken" in outcome.stdout


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_breaks_its_contract(house: Path, name: str) -> None:
    file, line, contract = FAULTS[name]
    planted = house / file
    planted.write_text(f"{line}\n", encoding="utf-8")
    try:
        outcome = lint(house)
    finally:
        planted.unlink()
    assert outcome.returncode != 0
    broken = [row for row in outcome.stdout.splitlines() if row.rstrip().endswith("BROKEN")]
    assert any(contract in row for row in broken), outcome.stdout


def test_the_top_level_is_the_given_one() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("the sources are not a git checkout")
    folders = {line.split("/", 1)[0] for line in tracked.stdout.splitlines() if "/" in line}
    assert folders - {".ci"} <= GIVEN
