"""The whole command with tiny models: clusters in this process, peers, and a server over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from deploy.bench.measuring.competitors import BenchSettings
from deploy.bench.measuring.runner import has_room_for_two
from deploy.bench.options import RaceOptions
from deploy.bench.race.race import run
from deploy.local.local_cluster import LocalCluster
from tests.unit.deploy.bench.conftest import SETTINGS, command

pytestmark = pytest.mark.slow

TOKENS = 12


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"question": "one two one two one"}, {"question": "abab"}, {"question": "x"}]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "race.json").read_text(encoding="utf-8"))
    return found


def test_methods_and_peers_run_on_the_same_prompts(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", str(TOKENS), "--prompts-per-task", "2"]
    arguments += ["--batches", "1,2", "--temperatures", "0,1", "--methods", "ngram", "--repeats", "2"]
    assert command(target, "race", *arguments) == 0
    found = read(out)
    names = ["ngram", "transformers: generate", "transformers: prompt lookup"]
    assert [entry["name"] for entry in found["entries"]][:3] == names
    assert any("assisted" in skipped["name"] for skipped in found["skipped"])
    cells = [cell for cell in found["cells"] if cell["competitor"] == "ngram"]
    assert len(cells) == 4
    for cell in cells:
        assert (len(cell["plain"]), len(cell["passes"])) == (3, 2)
        assert cell["exactness"]["equal"] == 4
    refused = [cell["skipped"] for cell in found["cells"] if "lookup" in cell["competitor"] and cell["skipped"]]
    assert refused == ["transformers drafts for one sequence at a time"] * 2
    greedy = [cell for cell in found["cells"] if cell["competitor"] == names[1] and cell["cell"]["temperature"] == 0]
    assert greedy and all(cell["exactness"]["equal"] == 4 for cell in greedy)


def test_a_method_that_fails_does_not_end_the_race(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    broken = "broken=draft.method=model,draft.model.path=/nowhere"
    arguments = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "4", "--batches", "1", "--no-peers"]
    arguments += ["--methods", "ngram", "--configuration", broken, "--prompts-per-task", "1"]
    assert command(target, "race", *arguments) == 0
    found = read(out)
    assert [entry["name"] for entry in found["entries"]] == ["ngram"]
    assert [skipped["name"] for skipped in found["skipped"]] == ["broken"]


def test_without_room_for_a_second_cluster_plain_runs_in_the_same_one(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.bench.measuring.runner.has_room_for_two", lambda *_: False)
    out = tmp_path / "out"
    arguments = ["--prompts", str(prompts), "--out", str(out), "--max-tokens", "4", "--batches", "1"]
    assert command(target, "race", *arguments, "--methods", "ngram") == 0
    found = read(out)
    assert found["entries"][0]["is_plain_own"] and found["cells"][0]["exactness"]["equal"] == 3
    assert all(answer["drafted"] == 0 for once in found["cells"][0]["plain"] for answer in once["answers"])
    assert "memory does not hold the target twice" in (out / "race.md").read_text(encoding="utf-8")


def test_room_is_measured_against_the_weights() -> None:
    assert has_room_for_two(Configuration(), 1)
    assert not has_room_for_two(Configuration(), 1 << 60)


async def test_a_server_is_measured_against_another_one(target: Path, prompts: Path, tmp_path: Path) -> None:
    assignments = (f"target.path={target}", *SETTINGS, "server.http_port=0", "server.grpc_port=0")
    settings = BenchSettings(None, assignments)
    drafting, plain = (settings.settings((f"draft.method={method}",)).configuration for method in ("ngram", "none"))
    async with LocalCluster(drafting, http=True) as one, LocalCluster(plain, http=True) as other:
        options = RaceOptions(
            prompts=(prompts,),
            out=tmp_path,
            max_tokens=TOKENS,
            batches=(2,),
            url=one.http_url,
            plain_url=f"{other.http_url}/v1",
            model=target.name,
            devices=2,
        )
        results = await asyncio.to_thread(run, options, settings)
    (cell,) = results.cells
    assert not cell.skipped and len(cell.plain) == 2 and cell.passes[0].tokens > 0
    assert results.entries[0].cost.devices == 2
    answers = [
        (found.text, mine.text) for found, mine in zip(cell.plain[0].answers, cell.passes[0].answers, strict=True)
    ]
    assert all(one == other for one, other in answers)
