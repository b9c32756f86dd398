"""A Ray cluster that cannot be joined is one line, which names the address and the reason."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from cluster.core.errors import ConfigurationError
from deploy.ray import start_ray
from deploy.ray.start_ray import join_ray
from tests.support.terminal import run_command


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own module stays as it is for other tests."""
    monkeypatch.setattr(start_ray, "_log_messages_of_ray", lambda: None)


@pytest.fixture
def unused() -> Iterator[str]:
    """An address at which nothing listens. Its port is taken, so that nobody begins to listen there meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("command", [("plan",), ("serve", "--set", "draft.method=none")])
def test_a_command_says_that_no_cluster_is_there(
    unused: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PILOTFISH_RAY_ADDRESS", unused)
    monkeypatch.setattr("deploy.commands.serve.raise_on_signals", lambda: None)
    assert run_command(*command, "--set", "cluster.ray_auth=off") == 2
    lines = capsys.readouterr().err.splitlines()
    expected = f"pilotfish: PILOTFISH_RAY_ADDRESS: needed HOST:PORT of a running Ray cluster, found {unused}: "
    assert [line for line in lines if line.startswith("pilotfish: ")] == [f"{expected}Connection refused"]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("Could not find any running Ray instance."), "Could not find any running Ray instance."),
        (RuntimeError("Version mismatch: started with\n    Ray: 2.50"), "Version mismatch: started with Ray: 2.50"),
        (ValueError("Invalid address format: auto"), "Invalid address format: auto"),
    ],
)
def test_what_ray_raises_is_one_line(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(start_ray.ray, "init", refuse)
    with pytest.raises(ConfigurationError) as refused:
        join_ray("auto", demands_token=False)
    assert str(refused.value).endswith(f"found auto: {reason}")
