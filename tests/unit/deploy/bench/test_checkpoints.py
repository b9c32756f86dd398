"""Variants of a model for measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.core.config.model_section import ModelSection
from tests.bench.checkpoints import VARIANTS, write
from tests.support.models import tiny
from workers.model.loading import load_model
from workers.model.model_files import resolve_model_directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_a_model_that_loads(variant: str, tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "model", tiny.llama())
    (source / "chat_template.jinja").write_text("template")
    directory = tmp_path / variant / "model"
    write(variant, source, directory)
    assert (directory / "chat_template.jinja").read_text() == "template"
    found = resolve_model_directory(str(directory), tmp_path / "cache")
    model = load_model(ModelSection(path=str(found), device="cpu", compile="off"))
    scaled = variant in ("yarn", "linear")
    assert model.max_context_len == 256 * (2 if scaled else 1)
    rope = json.loads((found / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == (variant if scaled else "default")
