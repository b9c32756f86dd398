"""Distributions share no file, and what an extra installs is asked for where it is missing."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError, ModelLoadError
from cluster.generation.text.marian_vocabulary import _Pieces
from deploy import cli, packaged_drafts
from deploy.doctor.models import model_findings
from deploy.models import resolve_models
from deploy.network.tracing import tracer_provider
from deploy.settings import load_settings
from tests.support.terminal import run_command

ROOT = Path(__file__).parents[3]


PARTS = {
    "pilotfish-bench": "deploy/bench",
    "pilotfish-distill": "deploy/distillation",
    "pilotfish-drafts": "deploy/drafts",
    "pilotfish-simulate": "deploy/simulation",
}
"""The folders of the distributions that `pilotfish` does not contain, by name."""


def project(directory: Path) -> dict[str, Any]:
    return tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))


def packages(directory: Path) -> set[Path]:
    names = project(directory)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {directory / name for name in names}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[=<>]", requirement)[0] for requirement in requirements}


def test_every_package_belongs_to_one_distribution() -> None:
    own, clients = packages(ROOT), packages(ROOT / "protos")
    assert not own & clients
    assert {path.parent for path in clients} == {ROOT / "protos"}
    assert not any(path.is_relative_to(ROOT / "protos") for path in own)


def test_the_cluster_and_the_package_for_vllm_depend_on_the_client_of_their_own_version() -> None:
    own, client = project(ROOT)["project"], project(ROOT / "protos")["project"]
    door = project(ROOT / "protos" / "pilotfish_vllm")["project"]
    assert own["version"] == client["version"] == door["version"]
    assert f"pilotfish-client=={client['version']}" in own["dependencies"]
    assert f"pilotfish-client=={client['version']}" in door["dependencies"]
    assert names(door["dependencies"]) == {"grpcio", "numpy", "pilotfish-client"}


def test_the_wheels_have_every_file_of_their_folder() -> None:
    training = ROOT / PARTS["pilotfish-distill"]
    listed = project(training)["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {name for name in listed if not name.startswith("..")} == {
        *(path.name for path in training.glob("*.py")),
        *(path.name for path in training.iterdir() if path.is_dir() and path.name != "__pycache__"),
    }
    bench = ROOT / PARTS["pilotfish-bench"]
    patterns = project(bench)["tool"]["hatch"]["build"]["targets"]["wheel"]["include"]
    others = {path for path in bench.rglob("*.*") if path.suffix not in {".py", ".pyc", ".toml"}}
    assert others == {path for pattern in patterns[1:] for path in bench.glob(pattern)}


def test_every_package_is_locked_with_its_hash_in_the_tested_version() -> None:
    tested = set(re.findall(r"^(\S+==\S+)$", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    locked = (ROOT / "requirements.lock").read_text("utf-8")
    names = re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", locked, re.MULTILINE)
    (torch,) = (one for one in tested if one.startswith("torch=="))
    assert {one.lower().replace("_", "-") for one in names} == {
        one.lower().replace("_", "-") for one in tested - {torch}
    }


@pytest.mark.parametrize("name", PARTS)
def test_an_extra_installs_each_further_distribution_of_the_same_version(name: str) -> None:
    own, part = project(ROOT)["project"], project(ROOT / PARTS[name])["project"]
    assert (part["name"], part["version"]) == (name, own["version"])
    assert own["optional-dependencies"][name.removeprefix("pilotfish-")] == [f"{name}=={own['version']}"]
    assert f"pilotfish=={own['version']}" in part["dependencies"]


def test_development_has_what_every_extra_and_distribution_depends_on() -> None:
    extras = project(ROOT)["project"]["optional-dependencies"]
    (own,) = (one for one in extras["dev"] if one.startswith("pilotfish["))
    assert {*own.removeprefix("pilotfish[").removesuffix("]").split(",")} == {"tracing", "translation"}
    on_gpus = {"flash"}
    parts = {name.removeprefix("pilotfish-") for name in PARTS}
    assert extras.keys() - {"dev"} - {"tracing", "translation"} - on_gpus == parts
    wanted = set().union(*(names(project(ROOT / folder)["project"]["dependencies"]) for folder in PARTS.values()))
    assert wanted - {"pilotfish", *PARTS} <= names(extras["dev"])


@pytest.mark.parametrize(("command", "extra"), [("bench", "bench"), ("distill", "distill"), ("simulate", "simulate")])
def test_a_command_whose_distribution_is_absent_says_what_to_install(
    command: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    for arguments in ([], ["--help"], ["serve", "--url", "http://127.0.0.1:8000"]):
        assert run_command(command, *arguments) == 2
        printed = " ".join(capsys.readouterr().err.split())
        assert printed == f"pilotfish: {command}: not installed; run `pip install 'pilotfish[{extra}]'`"


class TestDraftsThatAreNotInstalled:
    @pytest.fixture(autouse=True)
    def cards_alone(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for card in (ROOT / "deploy" / "drafts").glob("*/config.json"):
            (tmp_path / "drafts" / card.parent.name).mkdir(parents=True)
            shutil.copy(card, tmp_path / "drafts" / card.parent.name)
        monkeypatch.setattr(packaged_drafts, "__file__", str(tmp_path / "packaged_drafts.py"))

    def test_the_default_drafts_need_none(self) -> None:
        draft = load_settings("cpu", [], {}).configuration.draft
        assert draft.name == "suffix+recycling" and not draft.modules

    def test_a_translator_is_served_without_drafts(self) -> None:
        assert not load_settings("cpu", ["target.path=opus-mt-fr-en"], {}).configuration.draft.is_enabled

    @pytest.mark.parametrize("method", ["model", "eagle", "heads", "block"])
    def test_a_method_that_needs_one_says_what_to_install(self, method: str, tmp_path: Path) -> None:
        configuration = load_settings("cpu", [f"draft.method={method}"], {}).configuration
        (finding,) = (one for one in model_findings(configuration, tmp_path) if one.subject == f"draft.{method}.path")
        assert finding.remedy is not None and "pip install pilotfish-drafts" in finding.remedy
        (tmp_path / "target").mkdir()
        (tmp_path / "target" / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / "target" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        target = configuration.target.model_copy(update={"path": str(tmp_path / "target")})
        with pytest.raises(ModelLoadError, match="not installed; run `pip install pilotfish-drafts`"):
            resolve_models(configuration.model_copy(update={"target": target}), tmp_path, lambda _: None)


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
