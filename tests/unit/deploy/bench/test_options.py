"""The prompts and options of a benchmark run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError
from tests.bench import options
from tests.bench.__main__ import SECTIONS
from tests.support.models import tiny
from workers.draft.synthetic import SyntheticSettings


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("bench"), tiny.llama())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "needed a readable JSONL or text file; .*No such file"),
        ("", "at least one prompt, found none"),
        ('{"turns": ["a"]}\n{\n', "line 2: needed JSON"),
        ('{"turns": []}', "line 1: turns: needed at least one text"),
        ("[1]", "line 1: needed an object"),
        ('{"system": "a"}', "at least one question, found system messages alone"),
    ],
)
def test_unreadable_prompts_are_reported_with_file_and_line(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "spec.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        options.file_prompts(file, 1)
    assert str(file) in str(caught.value)


def test_chosen_settings_take_precedence_over_those_of_a_section(directory: Path) -> None:
    chosen = [f"target.path={directory}", "draft.synthetic.mode=serial"]
    _, asked = options.parse(
        SECTIONS, ["calibration", *(part for assignment in chosen for part in ("--set", assignment))]
    )
    configuration = asked.based_on("draft.synthetic.mode=run_ahead", "draft.method=synthetic")
    assert configuration.draft.settings("synthetic", SyntheticSettings).mode == "serial"
    assert configuration.draft.method == "synthetic"


def test_sections_are_chosen_by_name() -> None:
    assert options.parse(SECTIONS, [])[0] == list(SECTIONS)
    names, asked = options.parse(SECTIONS, ["step", "--quick", "--set", "draft.method=none"])
    assert (names, asked.repeats, asked.assignments) == (["step"], 1, ("draft.method=none",))
    assert options.parse(SECTIONS, ["serving-pairs", "--batches", "4,8,4"])[1].batches == (4, 8)
    for wrong in (["sleep"], ["--batches", "0"], ["--batches", "4;8"]):
        with pytest.raises(SystemExit):
            options.parse(SECTIONS, wrong)
