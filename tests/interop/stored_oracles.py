"""Outputs of other libraries that are stored beside tests: scripts write them again, and the files are compared."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.interop.speculators_drafts import Check

DRAFTS = Path(__file__).resolve().parents[1] / "unit" / "draft"
CLOSE = 1e-5


@dataclass(frozen=True)
class StoredOracle:
    """What a library computes with a tiny draft: `expected.safetensors` beside the folder `draft`."""

    format: str
    script: str
    """The script that writes both, below the tests of drafts. Its last argument is the directory for them."""
    folder: str
    """Where they are stored, below the tests of drafts."""
    arguments: tuple[str, ...] = ()


SPECULATORS = (
    StoredOracle("P-EAGLE", "eagle/speculators/make.py", "eagle/speculators"),
    StoredOracle("DFlash", "block/speculators/make.py", "block/speculators/dflash", ("dflash",)),
    StoredOracle("DFlash2", "block/speculators/make.py", "block/speculators/dflash2", ("dflash2",)),
    StoredOracle("DSpark", "block/speculators/make.py", "block/speculators", ("dspark",)),
    StoredOracle("MTP", "mtp/speculators/make_mtp.py", "mtp/speculators"),
)
"""Drafts whose stored outputs the library `speculators` wrote."""
TRANSFORMERS = (StoredOracle("DFlash", "block/dflash_of_transformers/make_dflash.py", "block/dflash_of_transformers"),)
"""Drafts whose stored outputs `transformers` wrote."""


def check_stored(
    oracle: StoredOracle, library: str, python: Path, environment: Mapping[str, str], seconds: float
) -> Check:
    """Let the library in the environment of `python` write the files again, and compare them with those stored.

    Raises `subprocess.CalledProcessError`, or `subprocess.TimeoutExpired` after so many seconds.
    """
    with tempfile.TemporaryDirectory() as home:
        command = [str(python), str(DRAFTS / oracle.script), *oracle.arguments, home]
        subprocess.run(command, cwd=home, env=dict(environment), check=True, timeout=seconds)
        is_same, said = compare(DRAFTS / oracle.folder, Path(home))
    return f"{library}, {oracle.format}: stored outputs", is_same, said


def compare(stored: Path, found: Path) -> tuple[bool, str]:
    """Whether two folders have the same drafts and, within 1e-5, the same outputs; and the largest difference."""
    largest = 0.0
    for file in ("draft/model.safetensors", "expected.safetensors"):
        wanted, tensors = load_file(stored / file), load_file(found / file)
        if wanted.keys() != tensors.keys():
            return False, f"{file} has {sorted(tensors)}, stored are {sorted(wanted)}"
        for name, value in wanted.items():
            if value.shape != tensors[name].shape:
                return False, f"{name} is {list(tensors[name].shape)}, stored is {list(value.shape)}"
            differences = (tensors[name].double() - value.double()).abs()
            if not torch.allclose(tensors[name].double(), value.double(), rtol=CLOSE, atol=CLOSE, equal_nan=True):
                return False, f"{name} differs by {float(differences.max()):.1e}"
            largest = max(largest, float(differences.nan_to_num(0.0).max()))  # a library stores NaN where it reads none
    return True, f"largest difference {largest:.1e}"
