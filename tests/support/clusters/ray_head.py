"""A Ray cluster of one node with its dashboard, and real commands that run against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import httpx

from workers.serve.node import free_port

LOOPBACK = "127.0.0.1"
START_SECONDS = 180.0
"""Longest time to start on a busy machine."""
COMMAND_SECONDS = 240.0
"""Longest time of a command on a busy machine."""
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class RayHead:
    """A running cluster."""

    address: str
    environment: dict[str, str]

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment to its end."""
        program = str(Path(sys.executable).parent / command[0])
        return subprocess.run(
            [program, *command[1:]],
            env=self.environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )


@contextmanager
def ray_head(cpus: int, log: Path, **variables: str) -> Iterator[RayHead]:
    """Inside, a Ray cluster runs. Its processes have these environment variables."""
    port, dashboard, *others = (free_port(LOOPBACK) for _ in range(6))
    names = ("ray-client-server", "dashboard-agent-listen", "metrics-export", "dashboard-agent-grpc")
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={port}", f"--num-cpus={cpus}", "--num-gpus=0", f"--node-ip-address={LOOPBACK}"]
    command += ["--include-dashboard=true", f"--dashboard-port={dashboard}", f"--object-store-memory={96 * 2**20}"]
    command += [f"--{name}-port={number}" for name, number in zip(names, others, strict=True)]
    token = token_hex(32)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"} | variables
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    address, url = f"{LOOPBACK}:{port}", f"http://{LOOPBACK}:{dashboard}"
    head = RayHead(address, environment | {"RAY_ADDRESS": address, "RAY_DASHBOARD_ADDRESS": url})
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait(httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}), process, log)
            yield head
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def _wait(dashboard: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if dashboard.get("/api/version", timeout=5.0).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"ray did not start: {log.read_text()[-2000:]}")
