"""The whole commands with tiny models: clusters in this process, peers, a server over HTTP, two models on a file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.evaluation.evaluate import run
from deploy.bench.measuring.competitors import BenchSettings
from deploy.bench.options import EvaluationOptions
from deploy.local.local_cluster import LocalCluster
from tests.support.translation.tiny_marian import ENGLISH, FRENCH, save_translator
from tests.unit.deploy.bench.conftest import SETTINGS, command
from tests.unit.deploy.bench.evaluation.support import write_jsonl

pytestmark = pytest.mark.slow

TRANSLATION = ({"fr": "the fish the fish", "en": "hello world"}, {"fr": "swim", "en": "swim"})
CORRECTION = ({"source": "the fish swim", "references": ["the fish swims"]},)


def test_methods_beams_and_peers_run_tasks_with_references(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["tasks", "--translation", str(write_jsonl(tmp_path, *TRANSLATION, name="translation.jsonl"))]
    arguments += ["--correction", str(write_jsonl(tmp_path, *CORRECTION, name="correction.jsonl"))]
    arguments += ["--out", str(out), "--max-tokens", "8", "--methods", "prediction"]
    arguments += ["--configuration", "beams=request.beams=2,draft.method=ngram"]
    assert command(target, *arguments) == 0
    found: dict[str, Any] = json.loads((out / "tasks.json").read_text(encoding="utf-8"))
    assert [entry["name"] for entry in found["entries"]][:2] == ["prediction", "beams"]
    beams = "2 beams, length penalty 1"
    assert {quality["competitor"] for quality in found["quality"]} >= {
        *("plain", "prediction", f"plain, {beams}", "beams"),
        *("transformers: generate", f"transformers: generate, {beams}"),
    }
    for cell in found["cells"]:
        if not cell["skipped"]:
            assert cell["exactness"]["equal"] == len(cell["passes"][0]["answers"]), cell["competitor"]
    for quality in found["quality"]:
        assert set(quality["scores"]) <= {"BLEU", "chrF", "GLEU (nltk)", "exact, %", "changed, %"} and quality["scores"]
        assert quality["competitor"].startswith("plain") or quality["differing"] == 0
    assert found["cells"][0]["passes"][0]["resources"]["cpu_seconds"] > 0
    text = (out / "tasks.md").read_text(encoding="utf-8")
    assert "## translation fr-en, batch 1" in text and "## correction, batch 1" in text and "## Cost" in text


def test_a_translator_of_its_own_translates_and_the_target_does_the_other_tasks(target: Path, tmp_path: Path) -> None:
    out, translator = tmp_path / "out", save_translator(tmp_path / "translator", "marian")
    rows = [{"fr": french, "en": english} for french, english in zip(FRENCH, ENGLISH, strict=True)]
    arguments = ["tasks", "--translation", str(write_jsonl(tmp_path, *rows, name="translation.jsonl"))]
    arguments += ["--translator", str(translator), "--correction", str(write_jsonl(tmp_path, *CORRECTION))]
    arguments += ["--out", str(out), "--max-tokens", "8", "--methods", "ngram"]
    assert command(target, *arguments) == 0
    for directory, task in ((out, "correction"), (out / "translation", "translation fr-en")):
        found: dict[str, Any] = json.loads((directory / "tasks.json").read_text(encoding="utf-8"))
        competitors = {quality["competitor"] for quality in found["quality"]}
        assert competitors >= {"plain", "ngram", "transformers: generate"}
        assert {cell["cell"]["task"] for cell in found["cells"]} == {task}


def test_prompts_in_the_prefix_cache_are_stored_before_the_measurements(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = write_jsonl(
        tmp_path, *({"source": f"{word} fish swim {'the ' * 9}", "references": [word]} for word in "abcde")
    )
    arguments = ["tasks", "--correction", str(data), "--out", str(out), "--max-tokens", "4", "--no-peers"]
    arguments += ["--configuration", "cached=request.reuses_cache=true,draft.method=none"]
    assert command(target, *arguments) == 0
    (cell,) = json.loads((out / "tasks.json").read_text(encoding="utf-8"))["cells"]
    assert cell["exactness"]["equal"] == 5
    for once in (*cell["plain"], *cell["passes"]):
        assert all(answer["cached_tokens"] >= answer["prompt_tokens"] - 32 > 0 for answer in once["answers"])


async def test_a_server_is_scored_beside_another_one(target: Path, tmp_path: Path) -> None:
    settings = BenchSettings(None, (f"target.path={target}", *SETTINGS, "server.http_port=0", "server.grpc_port=0"))
    drafting, plain = (settings.settings((f"draft.method={name}",)).configuration for name in ("prediction", "none"))
    async with LocalCluster(drafting, http=True) as one, LocalCluster(plain, http=True) as other:
        options = EvaluationOptions(
            correction=write_jsonl(tmp_path, *CORRECTION),
            out=tmp_path / "out",
            max_tokens=8,
            url=one.http_url,
            plain_url=other.http_url,
            model=target.name,
            send_prediction=True,
        )
        (found,) = await asyncio.to_thread(run, options, settings)
    quality = found.quality.of(one.http_url, found.results.cells[0].cell)
    assert quality is not None and quality.differing == 0 and quality.chrf_to_plain == 100
    assert found.results.cells[0].passes[0].answers[0].prompt_tokens > 0
    assert found.roofs is None


def test_two_models_are_compared_on_a_file(target: Path, tmp_path: Path) -> None:
    texts = write_jsonl(tmp_path, {"text": "the fish swim"}, {"text": "hello world"})
    out = tmp_path / "out"
    arguments = ["agreement", str(texts), "--draft", str(target), "--out", str(out), "--max-tokens", "8"]
    assert command(target, *arguments) == 0
    found: dict[str, Any] = json.loads((out / "agreement.json").read_text(encoding="utf-8"))
    # a draft that is the target agrees everywhere, and every drafted token is accepted
    for source in found["sources"].values():
        assert all(rank == 0 for text in source["texts"] for rank in text["ranks"])
    assert found["measured"]["tau"] > 2 and found["measured"]["exactness"] == "2 / 0 / 0"
    assert "the target's answers | chain of 7" in (out / "agreement.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", ["marian", "bart", "t5"])
def test_two_translators_are_compared_on_pairs(family: str, tmp_path: Path) -> None:
    translator = save_translator(tmp_path / "translator", family)
    rows = [{"fr": french, "en": english} for french, english in zip(FRENCH, ENGLISH, strict=True)]
    out = tmp_path / "out"
    arguments = ["agreement", str(write_jsonl(tmp_path, *rows)), "--draft", str(translator), "--out", str(out)]
    assert command(translator, *arguments, "--max-tokens", "8", "--texts", "3") == 0
    found: dict[str, Any] = json.loads((out / "agreement.json").read_text(encoding="utf-8"))
    assert set(found["sources"]) == {"texts", "the target's answers"}
    for source in found["sources"].values():
        assert len(source["texts"]) == 3 and all(rank == 0 for text in source["texts"] for rank in text["ranks"])
    means = {
        name: sum(text["target_log_probability"] for text in source["texts"])
        / sum(len(text["ranks"]) for text in source["texts"])
        for name, source in found["sources"].items()
    }
    assert means["the target's answers"] > means["texts"]  # the answers are its most probable tokens
    assert found["measured"]["tau"] > 1.5 and found["measured"]["exactness"] == "3 / 0 / 0"


def test_a_missing_file_ends_the_command_with_its_name(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tasks", "--arithmetic", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")]
    assert command(target, *arguments) == 2
    assert "--arithmetic" in capsys.readouterr().err
