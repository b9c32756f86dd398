"""`draft.method` or `draft.methods`: the one in the later layer (preset, file, `--set`) selects the drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.core.config.load import load
from cluster.core.errors import ConfigurationError
from deploy import cli
from deploy.bench.measuring.competitors import BenchSettings
from deploy.settings import load_settings, settings_from_arguments
from tests.support.models import tiny
from workers.serve.configuration import load_configuration

SEVERAL = "draft: {methods: [suffix, recycling]}\n"
ONE = "draft: {method: lookahead}\n"

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> str:
        (tmp_path / "settings.yaml").write_text(text)
        return str(tmp_path / "settings.yaml")

    return written


@pytest.mark.parametrize(
    ("file", "assignments", "selected"),
    [
        ("", [], "ngram"),
        (ONE, [], "lookahead"),
        (SEVERAL, [], "suffix+recycling"),
        (SEVERAL, ["draft.max_nodes=3"], "suffix+recycling"),
        (SEVERAL, ["draft.method=suffix"], "suffix"),
        (SEVERAL, ["draft.method=none"], "none"),
        (SEVERAL, ["draft.methods=[prediction]"], "prediction"),
        (SEVERAL, ["draft.method=null"], "suffix+recycling"),
        (SEVERAL, ["draft.methods=[]"], "ngram"),
        (SEVERAL, ["draft={method: suffix}"], "suffix"),
        (ONE, ["draft.methods=[suffix, recycling]"], "suffix+recycling"),
        (ONE, ["draft.methods=[]"], "lookahead"),
        (ONE, ["draft.method=suffix"], "suffix"),
        (ONE, ["draft.method=suffix", "draft.methods=[suffix]"], "suffix"),
    ],
)
@pytest.mark.parametrize("named", ["by the option", "by the environment"])
def test_set_wins_over_the_file(file: str, assignments: list[str], selected: str, named: str, write: Write) -> None:
    path = write(file)
    config, environment = (path, {}) if named == "by the option" else (None, {"PILOTFISH_CONFIG": path})
    assert load_settings(config, assignments, environment).configuration.draft.name == selected


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_set_wins_over_a_preset(preset: str) -> None:
    for assignments, selected in (
        (["draft.method=lookahead"], "lookahead"),
        (["draft.methods=[ngram, prediction]"], "ngram+prediction"),
    ):
        assert load_settings(preset, assignments, {}).configuration.draft.name == selected


def test_a_later_layer_of_assignments_wins_over_an_earlier_one(tmp_path: Path) -> None:
    below = ["draft.methods=[suffix, recycling]"]
    assert load_settings("cpu", ["draft.method=none"], {}, below=below).configuration.draft.name == "none"
    assert load_settings("cpu", ["draft.max_nodes=3"], {}, below=below).configuration.draft.name == "suffix+recycling"
    tiny.save(tmp_path, tiny.llama())
    common = ("draft.method=model", f"target.path={tmp_path}")
    competitor = BenchSettings("cpu", common).settings(("draft.methods=[ngram, suffix]",))
    assert competitor.configuration.draft.name == "ngram+suffix"


@pytest.mark.parametrize(
    "arguments",
    [
        {"draft.method": "suffix"},
        {"draft": {"method": "suffix"}},
        {"draft.methods": ["suffix"]},
        {"draft": {"methods": "[suffix]"}},
    ],
)
def test_the_arguments_of_serve_win_over_the_file(arguments: dict[str, object], write: Write) -> None:
    for file in (ONE, SEVERAL):
        found = settings_from_arguments({"config": write(file), **arguments}, {}).configuration
        assert found.draft.name == "suffix"


def test_a_contradiction_in_one_layer_names_both_fields(write: Write) -> None:
    both = r"draft: method \(lookahead\) and methods \(suffix, recycling\) must not both be set"
    with pytest.raises(ConfigurationError, match=both):
        load_settings(write("draft: {method: lookahead, methods: [suffix, recycling]}\n"), [], {})
    assignments = ["draft.method=lookahead", "draft.methods=[suffix, recycling]"]
    for order in (assignments, assignments[::-1]):
        with pytest.raises(ConfigurationError, match=both):
            load_settings("cpu", order, {})
    with pytest.raises(ConfigurationError, match=both):
        settings_from_arguments({"draft.method": "lookahead", "draft": {"methods": ["suffix", "recycling"]}}, {})


def test_the_command_line_takes_a_method_over_several_and_refuses_a_contradiction(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int | str | None, str]:
        monkeypatch.setattr("sys.argv", ["pilotfish", "plan", "--json", "--config", write(SEVERAL), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return ended.value.code, shown.out + shown.err

    in_processes = ("--set", "draft.placement=drafter", "--node", "cpus=8")
    for assignment, name in (("max_nodes=3", "suffix+recycling"), ("method=lookahead", "lookahead")):
        code, shown = run(*in_processes, "--set", f"draft.{assignment}")
        (draft,) = (one for one in json.loads(shown)["processes"] if one["role"] == "draft")
        assert (code or 0, draft["what"]) == (0, name)
    code, shown = run("--set", "draft.method=lookahead", "--set", "draft.methods=[ngram, suffix]")
    assert code == 2 and "method (lookahead) and methods (ngram, suffix)" in " ".join(shown.split())


@pytest.mark.parametrize("text", [{"method": "suffix"}, {"methods": ["suffix", "ngram"]}, {}])
def test_a_selection_passes_between_processes(text: dict[str, object]) -> None:
    found = load_configuration({"draft": text})
    assert load_configuration(found.model_dump(mode="json")) == found


def test_a_malformed_selection_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigurationError, match=r"^draft\.methods: 'suffix' is refused"):
        load({"draft": {"method": "ngram"}}, {"draft.methods": "suffix"})
    with pytest.raises(ConfigurationError, match=r"draft"):
        load({"draft": 3}, {"draft.method": "suffix"})
