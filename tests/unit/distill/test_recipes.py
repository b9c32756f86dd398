"""Recipes: files with the options of a training, which the command line overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError
from deploy.distillation import dspark, eagle3, training_plan
from deploy.distillation.recipe import read_recipe, recipes
from deploy.distillation.single_process_job import block_words, head_words
from tests.support.terminal import run_command
from workers.distill.loop import training_plan as plan_of_the_loop
from workers.distill.options import DSPARK, EAGLE3, KINDS, LOSSES, DistillOptions, Recipe

KIND_OF = {
    "dflash": "block",
    "dspark": "dspark",
    "eagle3": "eagle3",
    "medusa": "heads",
    "on-policy": "layers",
    "seq-kd": "layers",
}
ON_THE_COMMAND_LINE = {
    "dflash": "--kind block --vocabulary-size 8192 --selector-rank 0",
    "dspark": "--kind dspark --depths 6 --overlap-weight 1",
    "eagle3": "--kind eagle3 --vocabulary-size 8192 --depths 5 --pack",
    "medusa": "--kind heads --vocabulary-size 8192 --mix-rank 0 --selector-rank 0",
    "seq-kd": "",
}
"""The options that are equal to each packaged recipe."""
WITHOUT_INFLUENCE = {"depths": None, "overlap_weight": None}
"""Options that a recipe may name with the value that the kind has anyway."""


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[DistillOptions]:
    """The options of each command that plans a training."""
    found: list[DistillOptions] = []
    monkeypatch.setattr(training_plan, "print_plan", lambda options, *_: found.append(options))
    return found


def planned(chosen: list[DistillOptions], *words: str) -> DistillOptions:
    assert run_command("distill", "--plan", *words) == 0
    return chosen.pop()


def written(directory: Path, text: str) -> str:
    file = directory / "mine.yaml"
    file.write_text(text)
    return str(file)


class TestPackagedRecipes:
    def test_each_trains_its_kind(self) -> None:
        assert {name: read_recipe(name)["kind"] for name in recipes()} == KIND_OF

    @pytest.mark.parametrize("name", sorted(KIND_OF.keys() - {"on-policy"}))  # it has no plan
    def test_each_is_the_training_of_the_equal_options(self, chosen: list[DistillOptions], name: str) -> None:
        by_recipe = planned(chosen, "--recipe", name)
        by_options = planned(chosen, *ON_THE_COMMAND_LINE[name].split())
        same = {field: getattr(by_recipe, field) for field in WITHOUT_INFLUENCE}
        assert replace(by_recipe, recipe=None) == replace(by_options, **same)
        if name == EAGLE3:
            assert eagle3.options([*NEEDED, *head_words(by_recipe)]) == eagle3.options(
                [*NEEDED, *head_words(by_options)]
            )
        if name == DSPARK:
            assert dspark.options([*NEEDED, *block_words(by_recipe)]) == dspark.options(
                [*NEEDED, *block_words(by_options)]
            )

    def test_on_policy_is_a_small_model_that_writes_texts_and_counts_rejections_twice(self) -> None:
        found = plan_of_the_loop(
            DistillOptions(prompts=(Path(__file__),), out=Path("out"), steps=1, **read_recipe("on-policy"))
        )
        assert (found.on_policy, found.rejection_weight) == (0.5, 2.0)

    def test_all_are_listed_with_what_they_say_of_themselves(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run_command("distill", "--recipes") == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == sorted(KIND_OF)
        assert all(len(line) > 40 for line in lines)

    @pytest.mark.parametrize("name", ["medusa-joint", "medusa-2"])
    def test_a_training_of_the_target_itself_is_refused_by_name(
        self, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_command("distill", "--plan", "--recipe", name) == 2
        message = f"--recipe {name}: refused; it trains the target as well (Medusa-2)"
        assert message in capsys.readouterr().err


NEEDED = ["--target", "none", "--prompts", "none", "--out", "none"]


class TestOverrides:
    def test_options_of_the_command_line_replace_those_of_the_recipe_also_where_they_are_the_defaults(
        self, chosen: list[DistillOptions], tmp_path: Path
    ) -> None:
        mine = written(tmp_path, "kind: heads\ndepths: 3\nmix_rank: 8\nlearning_rate: 0.01\n")
        found = planned(chosen, "--recipe", mine, "--mix-rank", "1024", "--depths", "6")
        assert (found.depths, found.mix_rank, found.learning_rate) == (6, 1024, 0.01)

    @pytest.mark.parametrize(
        ("text", "words", "expected"),
        [
            ("minutes: 5\n", ("--steps", "7"), {"minutes": None, "steps": 7}),
            ("steps: 7\n", ("--minutes", "5"), {"minutes": 5.0, "steps": None}),
            ("layers: [0, 1]\n", ("--start", "draft"), {"layers": (), "start": Path("draft")}),
            ("kind: exit\nsearch: true\n", ("--layers", "0,1"), {"layers": (0, 1), "search": False}),
            ("kind: exit\nlayers: [0, 1]\n", ("--search",), {"layers": (), "search": True}),
        ],
    )
    def test_an_option_replaces_what_a_recipe_says_instead_of_it(
        self,
        chosen: list[DistillOptions],
        tmp_path: Path,
        text: str,
        words: tuple[str, ...],
        expected: Mapping[str, Any],
    ) -> None:
        found = planned(chosen, "--recipe", written(tmp_path, text), *words)
        assert {name: getattr(found, name) for name in expected} == expected


class TestFiles:
    def test_data_lie_beside_the_recipe(self, tmp_path: Path) -> None:
        text = "prompts: [a.jsonl, /data/b.jsonl]\nevaluate: c.jsonl\nheld_out: 4\n"
        found = read_recipe(written(tmp_path, text))
        assert found["prompts"] == (tmp_path / "a.jsonl", Path("/data/b.jsonl"))
        assert (found["evaluate"], found["held_out"]) == (tmp_path / "c.jsonl", 4)

    def test_data_may_lie_in_a_home_directory(self, tmp_path: Path) -> None:
        found = read_recipe(written(tmp_path, "prompts: [~/a.jsonl]\nevaluate: ~/c.jsonl\n"))
        assert (found["prompts"], found["evaluate"]) == ((Path.home() / "a.jsonl",), Path.home() / "c.jsonl")

    def test_every_option_of_a_training_can_be_in_a_file_and_none_of_a_run(self) -> None:
        own = {field.name for field in fields(Recipe)}
        assert {field.name for field in fields(DistillOptions)} - own == {
            *("recipe", "out", "plan", "device_gb", "json", "url", "cacert", "work"),
            *("device", "workers", "recompute", "notes"),
        }

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("learning_rat: 1\n", "learning_rat: unknown key; the nearest valid one is learning_rate"),
            ("out: draft\n", "out: unknown key; it must be one of prompts, field, kind"),
            ("depths: many\n", "depths: 'many' is refused; input should be a valid integer"),
            ("temperatures: 0.7\n", "temperatures: 0.7 is refused; it must be a list, as in [a, b]"),
            ("temperatures: [0, -1]\n", "temperatures: -1.0 is refused; each must be within 0 and 1e+06"),
            ("learning_rate: 0\n", "learning_rate: 0.0 is refused; it must be above 0"),
            ("vocabulary_size: 0\n", "vocabulary_size: 0 is refused; it must be above 0"),
            ("prompts: [~nobody-here/a]\n", "prompts: needed a known user, found ~nobody-here/a"),
            ("overlap_weight: -1\n", "overlap_weight: -1.0 is refused; it must be 0 or above"),
            ("on_policy: 2\n", "on_policy: 2.0 is refused; it must be within 0 and 1"),
            ("kind: medusa\n", "kind: 'medusa' is refused; it must be one of layers, heads"),
            ("loss: hinge\n", "loss: 'hinge' is unknown; it must be one of forward_kl, reverse_kl, overlap"),
            ("kind: heads\npack: true\n", "pack: refused for kind heads; it is for eagle3"),
            ("minutes: 1\nsteps: 1\n", "minutes and steps: needed one of them"),
            ("kind: exit\nsearch: true\nlayers: [0]\n", "search and layers: needed one of them; a search finds the"),
            ("steps: true\n", "steps: true is refused; it must be a number"),
            ("learning_rate: yes\n", "learning_rate: true is refused; it must be a number"),
            ("layers: [0, false]\n", "layers: false is refused; it must be a number"),
            ("kind: heads\nkind: eagle\n", "refused; line 2: kind is there twice in one section"),
            ("- heads\n", "needed sections with keys, found list"),
        ],
    )
    def test_what_is_refused_is_named_with_its_file_and_bound(self, text: str, message: str, tmp_path: Path) -> None:
        file = written(tmp_path, text)
        with pytest.raises(ConfigurationError) as refused:
            read_recipe(file)
        assert str(refused.value).startswith(f"{file}: {message}")

    def test_an_unknown_recipe_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ConfigurationError, match=r"--recipe absent: needed a readable file or a recipe \(dflash, "):
            read_recipe("absent")

    def test_a_name_that_no_file_can_have_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"--recipe a\0b: needed a readable file or a recipe .*null byte"):
            read_recipe("a\0b")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_to_overlap_with_the_target_or_refuses_it_by_name(kind: str) -> None:
    """The overlap of two distributions is what the best coupling accepts."""
    given: dict[str, Any] = {"kind": kind, "plan": kind not in (EAGLE3, "table"), "overlap_weight": 0.5}
    given |= {} if given["plan"] else {"prompts": (Path(__file__),), "out": Path("out"), "steps": 1}
    if kind == "table":
        with pytest.raises(ConfigurationError, match="--overlap-weight: refused for kind table; it is for layers"):
            DistillOptions(**given)
        return
    options = DistillOptions(**given)
    if kind == EAGLE3:
        assert eagle3.options([*NEEDED, *head_words(options)]).overlap == 0.5
    elif kind == DSPARK:
        assert dspark.options([*NEEDED, *block_words(options)]).overlap == 0.5
    else:
        assert plan_of_the_loop(replace(options, steps=1)).overlap_weight == 0.5
    if kind == DSPARK:
        with pytest.raises(ConfigurationError, match="--loss: refused for kind dspark; it is for layers"):
            replace(options, loss=LOSSES[2])
    else:
        assert replace(options, plan=False, prompts=(Path(__file__),), out=Path("out"), steps=1, loss=LOSSES[2])
