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
    def find_loss(self): return LOST

module = types.ModuleType("deploy.ray.serve_cluster")
module.ServeCluster = Cluster
sys.modules[module.__name__] = module
sys.argv = ["pilotfish", "serve", "--set", "server.http_port=0", "--set", "server.grpc_port=0"]
from deploy.cli import main
main()
"""


def start(directory: Path, drain_seconds: float, lost: str | None = None) -> subprocess.Popen[str]:
    """The command, waiting for its first signal, or with a cluster that has `lost` something."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("SECONDS", str(drain_seconds)).replace("LOST", repr(lost))],
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


def test_a_lost_cluster_ends_the_command_with_a_failure_so_that_another_is_started(tmp_path: Path) -> None:
    process = start(tmp_path, 0.1, "Ray has ended")
    assert process.wait(timeout=20) == 1
    assert process.stdout is not None
    written = process.stdout.read()
    assert written.endswith("Ray has ended\nstops at once\n")
