"""Loading a model leaves the terminal to the command that loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from cluster.core.config.model_section import ModelSection
from tests.support.models import tiny
from workers.model.loading import load_model


def test_the_progress_of_transformers_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny.save(tmp_path / "model", tiny.llama())
    transformers_logging.enable_progress_bar()
    capsys.readouterr()

    load_model(ModelSection.model_validate({"path": str(directory), "device": "cpu"}))

    assert capsys.readouterr().err == ""
