"""What other engines may take has an end."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.interop.__main__ import answer

pytestmark = pytest.mark.slow


def test_an_engine_that_writes_nothing_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    engine = tmp_path / "python"
    engine.write_text(f"#!/bin/sh\nsleep 61 &\necho $! > {tmp_path}/child\nsleep 61\n")
    engine.chmod(0o755)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"vLLM ended with -9 and without answers; it had 0\.5 s"):
        answer(engine, "token", {}, longest_seconds=0.5)
    assert time.monotonic() - begun < 30
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
