"""The two distributions share no file, and what an extra installs is asked for where it is missing."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from cluster.generation.text.marian_vocabulary import _Pieces
from deploy.network.tracing import tracer_provider

ROOT = Path(__file__).parents[3]


def project(directory: Path) -> dict[str, Any]:
    return tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))


def packages(directory: Path) -> set[Path]:
    names = project(directory)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {directory / name for name in names}


def test_every_package_belongs_to_one_distribution() -> None:
    own, clients = packages(ROOT), packages(ROOT / "protos")
    assert not own & clients
    assert {path.parent for path in clients} == {ROOT / "protos"}
    assert not any(path.is_relative_to(ROOT / "protos") for path in own)


def test_the_cluster_depends_on_the_client_of_its_own_version() -> None:
    own, client = project(ROOT)["project"], project(ROOT / "protos")["project"]
    assert own["version"] == client["version"]
    assert f"pilotfish-client=={client['version']}" in own["dependencies"]
    assert "-e ./protos -e '.[dev]'" in (ROOT / "Makefile").read_text("utf-8")


def test_development_has_every_extra() -> None:
    extras = project(ROOT)["project"]["optional-dependencies"]
    (own,) = (one for one in extras["dev"] if one.startswith("pilotfish["))
    assert {*own.removeprefix("pilotfish[").removesuffix("]").split(",")} == extras.keys() - {"dev"}


def test_traces_without_their_extra_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"server\.otlp_endpoint: .*pip install 'pilotfish\[tracing\]'"):
        tracer_provider("http://127.0.0.1:4317", "test")


def test_a_translator_without_its_extra_is_refused_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'pilotfish\[translation\]'"):
        _Pieces(tmp_path / "source.spm")
