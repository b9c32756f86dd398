"""`draft.method` or `draft.methods`: the one in the later layer (preset, file, `--set`) selects the drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.core.config.load import load
from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from deploy.bench.measuring.competitors import BenchSettings
from deploy.implied_settings import with_implied_settings
from deploy.settings import load_settings, settings_from_arguments
from tests.support.models import drafting_modules, tiny
from tests.support.terminal import run_command
from workers.draft.common.learning import salt_key
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
        {"draft.methods": "[suffix]"},
        {"draft": {"methods": ["suffix"]}},
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
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = run_command("plan", "--json", "--config", write(SEVERAL), *arguments)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    in_processes = ("--set", "draft.placement=drafter", "--node", "cpus=8")
    for assignment, name in (("max_nodes=3", "suffix+recycling"), ("method=lookahead", "lookahead")):
        code, shown = run(*in_processes, "--set", f"draft.{assignment}")
        (draft,) = (one for one in json.loads(shown)["processes"] if one["role"] == "draft")
        assert (code, draft["what"]) == (0, name)
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


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (
            {"method": "ngram"},
            "draft.learn: on is refused with ngram; draft.method must be one of block, blockwise, eagle, heads, model",
        ),
        ({"methods": ["heads", "suffix"]}, "draft.learn: on is refused with heads\\+suffix"),
        ({"method": "none"}, "draft.learn: on is refused with none"),
    ],
)
def test_only_a_method_that_can_be_trained_where_it_drafts_learns(
    draft: dict[str, object], reason: str, tmp_path: Path
) -> None:
    drafting_modules.save(tiny.save(tmp_path / "target", tiny.llama()), tmp_path / "heads", "heads", (2,))
    values = {
        "target": {"path": str(tmp_path / "target")},
        "draft": draft | {"heads": {"path": str(tmp_path / "heads")}},
    }
    with_implied_settings(load_configuration(values))
    with pytest.raises(ConfigurationError, match=reason):
        with_implied_settings(load_configuration(values, {"draft.learn": "on"}))


@pytest.mark.parametrize("method", ["heads", "blockwise"])
@pytest.mark.parametrize(
    ("acceptance", "is_refused"),
    [
        ({"acceptance": "coupled"}, False),
        ({"acceptance": "blockwise"}, False),  # it is strict by default
        ({"acceptance": "blockwise", "blockwise": {"top_k": 2}}, True),
        ({"acceptance": "blockwise", "blockwise": {"distance": 1}}, True),
        ({"acceptance": "blockwise", "blockwise": {"minimum_block": 2}}, True),
        ({"acceptance": "typical"}, True),
        ({"acceptance": "rejection"}, True),
        ({"acceptance": "block"}, True),
    ],
)
def test_drafts_learn_only_where_the_target_s_decisions_alone_are_accepted(
    method: str, acceptance: dict[str, object], tmp_path: Path, *, is_refused: bool
) -> None:
    """The learner counts the steps of a text anew with other weights, so the text may not depend on its drafts."""
    drafting_modules.save(tiny.save(tmp_path / "target", tiny.llama()), tmp_path / "heads", "heads", (2,))
    values: dict[str, object] = {
        "target": {"path": str(tmp_path / "target")} | acceptance,
        "draft": {"method": method, method: {"path": str(tmp_path / "heads")}},
    }
    with_implied_settings(load_configuration(values))
    learning = load_configuration(values, {"draft.learn": "on"})
    if not is_refused:
        assert with_implied_settings(learning).draft.learn == "on"
        return
    refused = f"draft.learn: on is refused with target.acceptance: {acceptance['acceptance']}, which accepts more"
    with pytest.raises(ConfigurationError, match=refused):
        with_implied_settings(learning)


def test_a_draft_model_that_learns_drafts_on_the_target_unless_there_are_several_drafters() -> None:
    values = {"draft": {"method": "model", "model": {"path": "x"}}}
    places = {}
    for learn in ("off", "on"):
        places[learn] = with_implied_settings(load_configuration(values, {"draft.learn": learn})).draft.placement
    assert places == {"off": "drafter", "on": "target"}
    several = with_implied_settings(load_configuration(values, {"draft.learn": "on", "draft.replicas": 2}))
    assert several.draft.placement == "drafter"


def test_a_target_fuses_no_hidden_states_for_a_drafter_that_learns(tmp_path: Path) -> None:
    """What fuses them is learned."""
    for learn, has_fusion in (("off", True), ("on", False)):
        settings = {"draft.placement": "drafter", "draft.learn": learn}
        evidence = with_implied_settings(of_eagle(tmp_path, settings)).target.evidence
        assert (evidence.fusion is not None, evidence.is_sent, len(evidence.taps)) == (has_fusion, True, 2)


@pytest.mark.parametrize(("read", "taken"), [((1,), (1, -1)), ((1, 2), (1, 2))])
def test_a_target_takes_its_last_layer_s_output_for_a_draft_that_learns(
    tmp_path: Path, read: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    """The probabilities that are learned follow from it. A target of two layers may show it already."""
    drafting_modules.save(tiny.save(tmp_path / "target", tiny.llama()), tmp_path / "eagle", "eagle", read)
    values = {
        "target": {"path": str(tmp_path / "target")},
        "draft": {"method": "eagle", "eagle": {"path": str(tmp_path / "eagle")}},
    }
    for learn, taps in (("off", read), ("on", taken)):
        implied = with_implied_settings(load_configuration(values, {"draft.learn": learn}))
        assert implied.target.evidence.taps == taps
        assert with_implied_settings(implied) == implied
    model = {"draft": {"method": "model", "model": {"path": "x"}, "learn": "on"}}
    assert with_implied_settings(load_configuration(model)).target.evidence.taps == ()


def of_eagle(directory: Path, settings: dict[str, object]) -> Configuration:
    """A configuration whose drafts are those of a module of the kind `eagle`, with `settings`."""
    drafting_modules.save(tiny.save(directory / "target", tiny.llama()), directory / "eagle", "eagle")
    values = {
        "target": {"path": str(directory / "target")},
        "draft": {"method": "eagle", "eagle": {"path": str(directory / "eagle")}},
    }
    return load_configuration(values, settings)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 256),
        ({"scheduler.max_sequences": 257}, 257),
        ({"scheduler.max_sequences": 257, "draft.eagle.sequences": 258}, 258),
        ({"draft.eagle.sequences": 32}, 32),
        ({"draft.placement": "target", "target.replicas": 9}, 256),
        ({"draft.placement": "drafter", "target.replicas": 8}, 256),
        ({"draft.placement": "drafter", "target.replicas": 9}, 288),
        ({"target.replicas": 17, "draft.replicas": 2}, 272),
        ({"draft.placement": "drafter", "target.autoscaling.max_replicas": 9}, 288),
        ({"draft.placement": "drafter", "target.replicas": 1024, "scheduler.max_sequences": 4096}, 1 << 22),
    ],
)
def test_a_drafter_keeps_as_many_sequences_as_all_targets_run_at_once(
    settings: dict[str, object], kept: int, tmp_path: Path
) -> None:
    implied = with_implied_settings(of_eagle(tmp_path, settings))
    assert implied.model_dump()["draft"]["eagle"]["sequences"] == kept
    assert with_implied_settings(implied) == implied


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"scheduler.max_sequences": 257}, "scheduler.max_sequences (257)"),
        (
            {"draft.placement": "drafter", "target.replicas": 9},
            "288, unless there are more draft.replicas: 9 targets share 1 drafter, each with scheduler.max_sequences",
        ),
        ({"target.replicas": 17, "draft.replicas": 2}, "272, unless there are more draft.replicas: 17 targets share 2"),
    ],
)
def test_fewer_sequences_of_a_drafter_than_all_targets_run_at_once_are_refused(
    settings: dict[str, object], reason: str, tmp_path: Path
) -> None:
    configuration = of_eagle(tmp_path, settings | {"draft.eagle.sequences": 256})
    expected = f"draft.eagle.sequences: 256 is refused; it must be at least {reason}"
    with pytest.raises(ConfigurationError, match=f"^{re.escape(expected)}"):
        with_implied_settings(configuration)


def test_learned_drafts_are_listed_and_rolled_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def drafts(*arguments: str) -> int:
        return run_command("drafts", *arguments, "--set", f"draft.learn_directory={tmp_path}")

    alice, bob = salt_key("alice/"), salt_key("bob/")
    for key in (alice, bob):
        for number in (1, 2):
            (tmp_path / key / f"00000{number}").mkdir(parents=True)
        (tmp_path / key / "served").write_text("2")
    assert drafts("rollback", "--client", "alice") == 0
    assert [(tmp_path / key / "served").read_text().strip() for key in (alice, bob)] == ["1", "2"]
    assert drafts("list") == 0
    shown = capsys.readouterr().out
    assert alice in shown and bob in shown
    assert drafts("rollback", "--client", "nobody") == 2
    assert "has no version to go back from" in capsys.readouterr().err
