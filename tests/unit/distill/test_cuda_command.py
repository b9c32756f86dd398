"""`make cuda` trains on a GPU. Its command is one that `pilotfish distill` takes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.distillation import single_process_job
from tests.unit.distill.conftest import Command
from workers.distill.job import DistillJob

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_training_of_make_cuda_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it starts gets the options; the target is a tiny one on the CPU here."""
    printed = subprocess.run(("make", "-n", "cuda"), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = (one for one in printed.replace("\\\n", " ").splitlines() if "pilotfish distill" in one)
    words = shlex.split(line)[2:]
    command, jobs = Command(tmp_path, monkeypatch), list[DistillJob]()
    monkeypatch.setattr(single_process_job, "distill_in_one_process", lambda job, server: jobs.append(job))
    monkeypatch.chdir(ROOT)
    own = ["--set", f"target.path={command.target}", "--set", "target.device=cpu"]

    assert command.run_words([*words, *own, "--out", str(tmp_path / "out")]) == 0

    (options,) = (job.options for job in jobs)
    assert (options.kind, options.minutes, options.device) == ("eagle3", 10, "cuda")
    assert all(file.exists() for file in options.prompts) and len(options.prompts) == 3
