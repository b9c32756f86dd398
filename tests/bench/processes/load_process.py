"""Measures the memory that one rank takes while it loads a stored model, for `memory` and a test.

    python -m tests.bench.processes.load_process '{"path": …}' RANK PORT

The JSON is a target section. All ranks load together. Prints one line of JSON. It runs in a process of its own, because
peak memory never decreases.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from cluster.core.config.target_section import TargetSection
from tests.bench.machine import peak_resident_bytes, resident_bytes
from workers.model.loading import load_model
from workers.serve.node import free_port
from workers.verify.group import join_group, leave_group

_ROOT = Path(__file__).resolve().parents[3]
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LoadingMemory:
    """Memory of a process that has loaded one rank's share of a model."""

    before_bytes: int
    """Resident bytes before: interpreter and libraries."""
    peak_bytes: int
    """Peak resident bytes while the model was loaded, beyond those."""
    held_bytes: int
    """Resident bytes of the loaded model, beyond those."""


def most_loading_bytes(share: int) -> float:
    """The most bytes that a rank may take while it loads a share of so many bytes of a file."""
    return 1.15 * share + 200e6


def measure(section: TargetSection, seconds: float) -> list[LoadingMemory]:
    """Load the model in one process for each rank. Returns what each took.

    Raises `RuntimeError` with the last errors of a process that fails, and `subprocess.TimeoutExpired`.
    """
    port, name = str(free_port(_LOOPBACK)), "tests.bench.processes.load_process"
    with ExitStack() as stack:
        processes = []
        for rank in range(section.tensor_parallel):
            command = [sys.executable, "-m", name, section.model_dump_json(), str(rank), port]
            errors = stack.enter_context(TemporaryFile("w+", encoding="utf-8"))
            process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
            stack.callback(process.kill)
            processes.append((process, errors))
        found = []
        for process, errors in processes:
            output, _ = process.communicate(timeout=seconds)
            if process.returncode != 0:
                errors.seek(0)
                raise RuntimeError(f"loading ended with {process.returncode}: {errors.read()[-2000:]}")
            found.append(LoadingMemory(**json.loads(output.splitlines()[-1])))
        return found


def main() -> None:
    """Load what the command line describes."""
    logging.disable(logging.WARNING)
    section = TargetSection.model_validate_json(sys.argv[1])
    rank, port = int(sys.argv[2]), int(sys.argv[3])
    if section.tensor_parallel > 1:
        join_group(section, rank, _LOOPBACK, port)
    before = resident_bytes()
    peak_before = peak_resident_bytes()
    model = load_model(section, rank=rank, tensor_parallel=section.tensor_parallel)
    peak, held = peak_resident_bytes(), resident_bytes()
    if peak <= peak_before:
        raise RuntimeError("loading took less memory than what came before; it cannot be measured")
    sys.stdout.write(f"{json.dumps(asdict(LoadingMemory(before, peak - before, held - before)))}\n")
    del model
    if section.tensor_parallel > 1:
        leave_group()


if __name__ == "__main__":
    main()
