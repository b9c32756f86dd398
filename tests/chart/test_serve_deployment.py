"""The Serve configuration that the Helm chart renders runs on Ray, and the chart's own test finds nothing wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.chart.rendering import CHART, ci_values, render
from tests.support.clusters.json_process import JsonProcess
from tests.support.models import tiny, tiny_tokenizer
from workers.serve.node import free_port

pytestmark = pytest.mark.ray

DEPLOY_SECONDS = 300.0
CHECK_SECONDS = 120.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    tiny.save(directory, tiny.llama(vocab_size=320, max_position_embeddings=1024))
    return tiny_tokenizer.byte_level(directory)


def test_the_rendered_configuration_serves_both_apis(model: Path, tmp_path: Path) -> None:
    http_port, grpc_port = free_port("127.0.0.1"), free_port("127.0.0.1")
    values = ci_values("cpu-smoke")
    values["settings"]["target"]["path"] = str(model)
    values["settings"]["server"] = {"grpc_port": grpc_port}
    config = render(values).serve_config
    config["http_options"]["port"] = http_port  # pods have port 8000 to themselves, this machine may not
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(config), "utf-8")

    process = JsonProcess("tests.support.chart.serve_config_main", str(file))
    try:
        assert process.read(DEPLOY_SECONDS) == {"pilotfish": "RUNNING"}
        outcome = check(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        wrong = check(f"http://127.0.0.1:{http_port}/nowhere", f"127.0.0.1:{grpc_port}")
    finally:
        process.stop()
    assert outcome.returncode == 0, outcome.stderr
    assert wrong.returncode != 0 and "404" in wrong.stderr


def check(url: str, address: str) -> subprocess.CompletedProcess[str]:
    """Run the script of the chart's test pod."""
    script = CHART / "files" / "check_apis.py"
    environment = os.environ | {"HTTP_URL": url, "GRPC_ADDRESS": address}
    return subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
    )
