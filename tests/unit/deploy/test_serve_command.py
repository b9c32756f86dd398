"""`pilotfish serve` between its signals. The cluster is a fake, whose drain lasts until the process ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys, time, types
from deploy.settings import load_settings

class Cluster:
    def __init__(self, settings, report, log=None):
        self.configuration, self.is_lossless, self.application = settings.configuration, True, "fake"
    def report_to(self, report): pass
    def start(self): pass
    def drain(self): print("drains", flush=True); time.sleep(SECONDS)
    def stop(self): print("stops", flush=True)
    def stop_at_once(self): print("stops at once", flush=True)

module = types.ModuleType("deploy.ray.serve_cluster")
module.ServeCluster = Cluster
sys.modules[module.__name__] = module
sys.argv = ["pilotfish", "serve", "--set", "server.http_port=0", "--set", "server.grpc_port=0"]
from deploy.cli import main
main()
"""


def start(directory: Path, drain_seconds: float) -> subprocess.Popen[str]:
    """The command, waiting for its first signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("SECONDS", str(drain_seconds))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
    )
    assert process.stdout is not None
    while "is ready at" not in (line := process.stdout.readline()):
        assert process.poll() is None, line
    time.sleep(0.5)  # it prints its examples, then waits
    return process


def test_the_first_signal_drains_and_stops(tmp_path: Path) -> None:
    process = start(tmp_path, 0.1)
    process.send_signal(signal.SIGTERM)
    written, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert written.endswith("draining; a second signal stops at once\ndrains\nstops\nstopped\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_stops_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, 60.0)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(number)
    written, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert time.monotonic() - begun < 2.0
    assert written.endswith("drains\nstops at once\nstopped at once; answers that still ran may be cut off\n")
