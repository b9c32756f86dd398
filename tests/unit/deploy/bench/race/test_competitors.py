"""Which configurations take part in a race, and what a user writes to add one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError
from deploy.bench.contestants.answers import RequestOptions
from deploy.bench.measuring.competitors import BenchSettings, find_competitors, read_configurations
from deploy.bench.measuring.results import Cell
from deploy.bench.measuring.runner import groups
from deploy.bench.measuring.session import Schedule, plan_cells
from deploy.bench.measuring.setup import read_tasks
from deploy.bench.options import RaceOptions
from tests.support.models import drafting_modules, tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tiny.save(tmp_path_factory.mktemp("race") / "target", tiny.llama(vocab_size=320)))


def options(**changes: object) -> RaceOptions:
    return RaceOptions(prompts=(Path("prompts.jsonl"),), out=Path("out"), **changes)  # type: ignore[arg-type]


def test_a_configuration_has_a_name_and_settings() -> None:
    text = "wide=draft.method=ngram,draft.ngram.candidates=4,draft.synthetic.acceptance=[0.9,0.8]"
    assert read_configurations(text) == {
        "wide": ("draft.method=ngram", "draft.ngram.candidates=4", "draft.synthetic.acceptance=[0.9,0.8]")
    }


def test_a_file_lists_configurations(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("- name: deep\n  set: {draft.method: ngram, draft.max_depth: 16}\n- name: none\n  set: {}\n")
    assert read_configurations(str(file)) == {"deep": ("draft.method=ngram", "draft.max_depth=16"), "none": ()}


@pytest.mark.parametrize("text", ["lookup", "lookup=ngram", "=draft.method=ngram"])
def test_a_configuration_without_name_or_settings_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="needed NAME=KEY=VALUE"):
        read_configurations(text)


def test_all_methods_that_keep_the_answers_take_part_and_the_others_are_named(target: Path) -> None:
    competitors, skipped = find_competitors(options(), BenchSettings(None, (f"target.path={target}",)))
    names = {competitor.name for competitor in competitors}
    assert {"ngram", "early_exit"} <= names and not names & {"none", "synthetic"}
    assert any(entry.name == "model" and "path must be set" in entry.reason for entry in skipped)


def test_chosen_methods_and_configurations_take_part(target: Path) -> None:
    chosen = options(methods="none", configuration=("deep=draft.method=ngram,draft.max_depth=16",))
    competitors, skipped = find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
    assert [competitor.name for competitor in competitors] == ["none", "deep"] and not skipped
    assert competitors[1].configuration.draft.max_depth == 16


def test_the_draft_of_draft_path_is_that_of_the_method_that_reads_it(target: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    drafting_modules.save(target, draft, "eagle")
    settings = BenchSettings(None, (f"target.path={target}", f"draft.path={draft}"))
    assert settings.plain().configuration.draft.selected("method") == ("none",)
    chosen = options(methods="eagle,ngram", configuration=("deep=draft.max_depth=16", "other=draft.method=suffix"))
    competitors, skipped = find_competitors(chosen, settings)
    drafts = {one.name: one.configuration.draft for one in competitors}
    assert not skipped
    assert {name: found.name for name, found in drafts.items()} == {
        "eagle": "eagle",
        "ngram": "ngram",
        "deep": "eagle",
        "other": "suffix",
    }
    for name in ("eagle", "deep"):
        assert drafts[name].modules["eagle"].path == str(draft)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'medussa' is unknown"):
        find_competitors(options(methods="medussa"), BenchSettings(None, ()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batches": (0,)}, "--batches"),
        ({"temperatures": (3.0,)}, "--temperatures"),
        ({"repeats": 0}, "--repeats: 0 is refused"),
        ({"url": "http://localhost:8000"}, "--url and --model"),
        ({"plain_url": "http://localhost:8000"}, "--plain-url"),
    ],
)
def test_an_option_out_of_bounds_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        options(**changes)


def test_every_task_runs_at_every_batch_and_temperature() -> None:
    cells = plan_cells({"qa": (), "mathematics": ()}, Schedule(8, batches=(1, 8), temperatures=(0.0, 1.0)))
    assert len(cells) == 8
    assert cells[:3] == (Cell("qa", 1, 0.0), Cell("mathematics", 1, 0.0), Cell("qa", 1, 1.0))


class TestTasks:
    """Prompts of several formats."""

    def write(self, file: Path, *rows: dict[str, object]) -> Path:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    def test_a_task_is_the_category_or_the_name_of_the_file(self, tmp_path: Path) -> None:
        bench = self.write(
            tmp_path / "bench.jsonl",
            {"turns": ["One?", "More?"], "category": "writing"},
            {"turns": ["Two?"], "category": "math_reasoning"},
            {"turns": ["Three?"], "category": "coding"},
        )
        plain = self.write(tmp_path / "gsm8k.jsonl", {"question": "Four?"}, {"question": "Five?"})
        tasks = read_tasks([bench, plain], (), 1, None, None)
        assert {name: [prompt.text for prompt in prompts] for name, prompts in tasks.items()} == {
            "conversation": ["One?"],
            "mathematics": ["Two?"],
            "gsm8k": ["Four?"],
        }
        assert list(read_tasks([bench, plain], ["gsm8k"], 8, None, None)) == ["gsm8k"]
        with pytest.raises(ConfigurationError, match="chess is not in the prompts; there are conversation, math"):
            read_tasks([bench], ["chess"], 1, None, None)

    def test_a_function_of_humaneval_becomes_a_request(self, tmp_path: Path) -> None:
        row = {
            "task_id": "HumanEval/0",
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "test": "",
            "canonical_solution": "",
        }
        (prompt,) = read_tasks([self.write(tmp_path / "humaneval.jsonl", row)], (), 8, None, None)["humaneval"]
        assert prompt.text.startswith("Complete this Python function.") and "```python\ndef f(x):\n```" in prompt.text


class TestRequests:
    """Competitors that change requests, and the combinations that come with Pilotfish."""

    def test_assignments_to_request_change_requests_and_not_the_cluster(self, target: Path) -> None:
        chosen = options(
            methods="", configuration=("beams=request.beams=4,request.length_penalty=0.5,draft.method=none",)
        )
        (found,), _ = find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
        assert found.request == RequestOptions(beams=4, length_penalty=0.5)
        assert found.request.name == "4 beams, length penalty 0.5" and not found.alters_target

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("one=request.beams=0", "request.beams: 0 is refused"),
            ("one=request.beam=4", "request.beam: 4 is refused"),
            ("one=draft.max_depht=3", "draft.max_depht: unknown key; the nearest valid one is draft.max_depth"),
            ("one=draft.model.paht=x", "draft.model.paht: unknown key"),
            ("one=draft.max_depth=-1", "draft.max_depth: -1 is refused"),
            ("one=draft.method=medussa", "'medussa' is unknown"),
            ("one=draft.methods=[ngram,medussa]", "'medussa' is unknown"),
            ("one=draft.method=ngram,target.dtype=float17", "target.dtype: 'float17' is refused"),
        ],
    )
    def test_a_wrong_setting_is_refused_with_the_competitor_and_its_name(
        self, text: str, words: str, target: Path
    ) -> None:
        chosen = options(methods="ngram", configuration=(text,))
        with pytest.raises(ConfigurationError) as refused:
            find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
        assert str(refused.value).startswith("--configuration one: ") and words in str(refused.value)

    def test_a_method_whose_path_is_optional_takes_part(self, target: Path) -> None:
        chosen = options(configuration=("one=draft.method=early_exit,draft.early_exit.layers=1",))
        (found,), _ = find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
        assert found.name == "one"

    @pytest.mark.parametrize(
        ("text", "words"),
        [("one=draft.path=./missing", "./missing"), ("one=draft.method=model", "draft.model: path must be set")],
    )
    def test_a_configuration_without_its_draft_is_left_out_with_the_reason(
        self, text: str, words: str, target: Path
    ) -> None:
        chosen = options(methods="ngram", configuration=(text,))
        (found,), (skipped,) = find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
        assert (found.name, skipped.name) == ("ngram", "one") and words in skipped.reason

    def test_a_combination_leaves_out_methods_without_a_draft_for_the_target(self, target: Path) -> None:
        chosen = options(configuration=("window",))
        found, skipped = find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
        assert "window ngram" in {one.name for one in found}
        assert [one.name for one in skipped] == ["window model"]

    def test_settings_of_the_target_may_change_its_answers(self, target: Path) -> None:
        chosen = options(
            configuration=("a=target.kv.window=64", "b=target.kv.prefix_cache=false", "c=draft.max_nodes=3")
        )
        found, _ = find_competitors(chosen, BenchSettings(None, (f"target.path={target}",)))
        assert [one.alters_target for one in found] == [True, False, False]

    @pytest.mark.parametrize("name", ["int8", "prefix-cache", "window", "beams", "long-context"])
    def test_every_combination_has_plain_decoding_first_and_known_settings(self, name: str, target: Path) -> None:
        found = read_configurations(name)
        assert "draft.method=none" in next(iter(found.values()))
        competitors, skipped = find_competitors(
            options(configuration=(name,)), BenchSettings(None, (f"target.path={target}",))
        )
        assert len(competitors) + len(skipped) == len(found)
        assert all("path must be set" in one.reason for one in skipped)  # drafts of the packaged target

    def test_competitors_with_other_requests_do_not_share_passes_of_plain_decoding(self, target: Path) -> None:
        texts = ("a=draft.max_nodes=3", "b=draft.max_nodes=4", "c=request.beams=2", "d=draft.max_nodes=5")
        found, _ = find_competitors(options(configuration=texts), BenchSettings(None, (f"target.path={target}",)))
        assert [[one.name for one in group] for group in groups(found, 2)] == [["a", "b"], ["c"], ["d"]]
        assert [len(group) for group in groups(found, 1)] == [1, 1, 1, 1]
