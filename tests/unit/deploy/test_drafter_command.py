"""`pilotfish drafter`: one drafter for another engine, in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from cluster.core.errors import ConfigurationError
from cluster.wire.peer_access import TOKEN_KEY
from deploy.commands.drafter import drafter
from deploy.network.cluster_token import draw_token
from pilotfish.v1 import draft_pb2, draft_pb2_grpc
from tests.support.certificates import make_certificate

TOKEN = draw_token().text


@contextmanager
def running(directory: Path, *settings: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of the command, and the address that it prints."""
    command = [sys.executable, "-m", "deploy.cli", "drafter", "--port", "0"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PILOTFISH_CLUSTER_TOKEN", TOKEN)
        process = subprocess.Popen(
            [*command, *(part for one in settings for part in ("--set", one))], stderr=subprocess.PIPE, text=True
        )
    try:
        assert process.stderr is not None
        found = None
        while found is None and (line := process.stderr.readline()):
            found = re.search(r"drafts by (\S+) at (\S+) \(gRPC\)", line)
        assert found is not None
        yield process, found[2]
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def test_it_tells_what_it_drafts_with_to_callers_with_the_token_until_a_signal(tmp_path: Path) -> None:
    with running(tmp_path, "draft.method=ngram", "cluster.lease_seconds=7") as (process, address):
        with grpc.insecure_channel(address) as channel:
            stub = draft_pb2_grpc.DraftServiceStub(channel)
            with pytest.raises(grpc.RpcError) as refused:
                stub.Describe(draft_pb2.DraftServiceDescribeRequest(), timeout=20.0)
            found = stub.Describe(draft_pb2.DraftServiceDescribeRequest(), timeout=20.0, metadata=[(TOKEN_KEY, TOKEN)])
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert [(one.name, one.taps, one.top, one.decisions) for one in found.methods] == [("ngram", 0, 0, False)]
        assert found.lease_seconds == 7.0
        process.send_signal(signal.SIGTERM)
        assert process.wait(20.0) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["draft.method=eagle"], "eagle is refused; it needs the target's hidden states"),
        (["draft.method=mtp"], "mtp is refused; it needs the target's hidden states"),
        (["draft.methods=[suffix, recycling]"], "recycling is refused; it needs the target's ranked tokens, decisions"),
        (["draft.method=lookahead"], "lookahead is refused; it needs the target's decisions"),
        (["draft.method=early_exit"], "early_exit is refused; it drafts only on the target"),
        (["draft.method=none"], "none is refused; it drafts nothing"),
    ],
)
def test_a_method_that_needs_more_than_tokens_is_refused_by_name(
    settings: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_CLUSTER_TOKEN", TOKEN)
    with pytest.raises(ConfigurationError) as refused:
        drafter("cpu", settings, "127.0.0.1", 0)
    assert said in str(refused.value)
    assert str(refused.value).endswith("; choose one that reads tokens alone, as model or ngram")


@pytest.mark.parametrize("with_certificates", [False, True], ids=["plain", "certificates"])
def test_a_token_that_callers_can_know_is_demanded(
    with_certificates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PILOTFISH_CLUSTER_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the drafter's token would be derived from this one")
    tls = make_certificate(tmp_path)
    files = [f"cluster.tls.{name}={getattr(tls, name)}" for name in ("ca", "certificate", "key")]
    with pytest.raises(ConfigurationError, match="PILOTFISH_CLUSTER_TOKEN: needed the token that callers present"):
        drafter("cpu", ["draft.method=ngram", *(files if with_certificates else ())], "127.0.0.1", 0)


def test_a_drafter_of_another_engine_learns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CLUSTER_TOKEN", TOKEN)
    with pytest.raises(ConfigurationError, match="on is refused; another engine does not say whose texts it sends"):
        drafter("cpu", ["draft.method=model", "draft.model.path=x", "draft.learn=on"], "127.0.0.1", 0)
