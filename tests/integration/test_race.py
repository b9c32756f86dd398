"""`pilotfish bench race` measures real drafting methods on real prompts, and finds their answers equal to plain's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.terminal import run_command

pytestmark = pytest.mark.weights

PROMPTS = (
    "Repeat this sentence three times: The pilot fish swims ahead of the shark and eats what the shark leaves.",
    "Write the numbers from one to twenty as digits with commas between them.",
)
TOKENS = 24


def test_a_race_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "repetition.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    arguments = ["--prompts", str(prompts), "--out", str(tmp_path / "out"), "--max-tokens", str(TOKENS)]
    arguments += ["--batches", "1", "--methods", "none,ngram", "--no-peers"]
    assert run_command("bench", "race", *arguments, "--set", "draft.controller=off") == 0

    found = json.loads((tmp_path / "out" / "race.json").read_text(encoding="utf-8"))
    assert "bench race" in found["command"] and found["machine"]["versions"]["torch"]
    assert [entry["name"] for entry in found["entries"]] == ["none", "ngram"]
    cells = {cell["competitor"]: cell for cell in found["cells"]}
    for cell in cells.values():
        assert cell["cell"] == {"task": "repetition", "batch": 1, "temperature": 0.0}
        assert cell["exactness"] == {"equal": 2, "explained": 0, "wrong": 0, "not_compared": 0, "largest_gap": 0.0}
        assert (len(cell["plain"]), len(cell["passes"])) == (2, 1)
        for answer in (answer for once in [*cell["plain"], *cell["passes"]] for answer in once["answers"]):
            assert 0 < len(answer["tokens"]) <= TOKENS
            assert sum(arrival["tokens"] for arrival in answer["arrivals"]) == len(answer["tokens"])
    accepted = {
        name: sum(arrival["accepted"] for answer in cell["passes"][0]["answers"] for arrival in answer["arrivals"])
        for name, cell in cells.items()
    }
    assert accepted["none"] == 0 < accepted["ngram"]
    assert "| ngram |" in capsys.readouterr().out
    assert "## Speed by task" in (tmp_path / "out" / "race.md").read_text(encoding="utf-8")
