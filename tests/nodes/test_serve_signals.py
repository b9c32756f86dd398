"""`pilotfish serve` as an operator runs it: its log, the first signal, which drains, and the second, which does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.signals import SIGNALLED
from tests.support.clusters.ray_head import LOOPBACK
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

START_SECONDS = 240.0
CONTEXT = 4096


class RunningServe:
    """A process of `pilotfish serve` whose output is read by a thread."""

    def __init__(self, directory: Path, *settings: str) -> None:
        model = directory / "model"
        tiny_tokenizer.byte_level(tiny.save(model, tiny.llama(vocab_size=320, max_position_embeddings=CONTEXT)))
        self.port = free_port(LOOPBACK)
        chosen = (
            f"target.path={model}",
            "target.device=cpu",
            "target.compile=off",
            "target.threads=1",
            "target.kv.pool_bytes=16777216",
            "draft.methods=[]",
            f"server.http_port={self.port}",
            f"server.grpc_port={free_port(LOOPBACK)}",
            f"limits.max_output_tokens={CONTEXT}",
            *settings,
        )
        options = [part for setting in chosen for part in ("--set", setting)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "serve", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PILOTFISH_CACHE_DIR": str(directory / "cache")},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, text: str, times: int = 1) -> None:
        """Return once that many lines have the text."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            if sum(text in line for line in self.lines) >= times:
                return
            time.sleep(0.1)
        pytest.fail("\n".join(self.lines))

    def stream(self) -> Iterator[str]:
        """The data of the events of a long answer."""
        body = {"prompt": "hello", "max_tokens": CONTEXT - 16, "ignore_eos": True, "stream": True}
        url = f"http://{LOOPBACK}:{self.port}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60.0) as response, suppress(httpx.TransportError):
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")


@contextmanager
def running_serve(directory: Path, *settings: str) -> Iterator[RunningServe]:
    server = RunningServe(directory, *settings)
    try:
        server.wait_for("is ready at")
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(60)
        finally:
            server.process.kill()


def test_a_signal_while_ray_starts_ends_the_command_as_any_other(tmp_path: Path) -> None:
    """Ray has a handler of SIGTERM of its own, which ends a process with another status and without a word."""
    server = RunningServe(tmp_path)
    until = time.monotonic() + START_SECONDS
    while not any(one.name() == "raylet" for one in psutil.Process(server.process.pid).children()):
        assert time.monotonic() < until and server.process.poll() is None, server.lines
        time.sleep(0.1)
    server.process.terminate()
    try:
        assert server.process.wait(60) == SIGNALLED
    finally:
        server.process.kill()


def test_one_stream_of_json_lines_and_a_second_signal_that_ends_answers_and_the_process(tmp_path: Path) -> None:
    """All processes log as JSON. The second signal ends the answers with an error, and the process in two seconds."""
    drafting = ("draft.methods=[ngram]", "draft.placement=drafter", "draft.replicas=1", "log_level=info")
    with running_serve(tmp_path, "server.log_format=json", *drafting) as server:
        url = f"http://{LOOPBACK}:{server.port}/v1/completions"
        answered = httpx.post(url, json={"prompt": "hello", "max_tokens": 4}, headers={"x-request-id": "mine"})
        refused = httpx.post(url, json={"prompt": "hello", "max_tokens": -1}, headers={"x-request-id": "wrong"})
        assert (answered.status_code, refused.status_code) == (200, 400)
        (drafter,) = (one for one in psutil.Process(server.process.pid).children(recursive=True) if is_drafter(one))
        drafter.kill()
        server.wait_for("has joined", 2)
        check_that_the_second_signal_stops_at_once(server)
    lines = [json.loads(line) for line in server.lines]
    assert all({"time", "level", "process", "pid", "logger", "message"} <= set(line) for line in lines)
    requests = {line["request_id"]: line for line in lines if line["logger"] == "pilotfish.requests"}
    assert (requests["mine"]["process"], requests["mine"]["status"]) == ("ingress", 200)
    assert (requests["wrong"]["error"], requests["wrong"]["status"]) == ("InvalidRequest", 400)
    assert {"serve", "ingress", "coordinator"} <= {line["process"] for line in lines}
    assert any(line["level"] in ("warning", "error") and "ray" in line["logger"] for line in lines), "nobody says so"
    assert lines[-1]["process"] == "serve" and "stopped at once" in lines[-1]["message"]


def check_that_the_second_signal_stops_at_once(server: RunningServe) -> None:
    """The answer that is streamed when the first signal arrives ends with an error."""
    events: list[str] = []
    reading = threading.Thread(target=lambda: events.extend(server.stream()), daemon=True)
    reading.start()
    while len(events) < 3 and reading.is_alive():
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert server.process.poll() is None  # it drains
    server.process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    assert server.process.wait(30) == 130
    assert time.monotonic() - begun < 2.0
    reading.join(5)
    *_, last, done = events
    assert done == "[DONE]"
    error = json.loads(last)["error"]
    assert error["code"] == "service_unavailable"
    assert error["message"] == "the server cannot answer now; try again"
    time.sleep(0.2)


def is_drafter(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "ServeReplica" in " ".join(process.cmdline()) and ":Draft" in " ".join(process.cmdline())
    return False
