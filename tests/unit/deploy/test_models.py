"""Names in a configuration become directories, for the target and for the draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.config import load
from cluster.core.errors import ModelLoadError
from deploy import models


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_directories_are_written_into_the_configuration(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "target"), model_directory(tmp_path / "draft")
    written = load({}, {"target.path": str(target), "draft.method": "model", "draft.model.path": str(draft)})

    found = models.resolve_models(written, tmp_path, lambda _: None)

    assert (found.target, found.draft) == (target, draft)
    assert found.configuration.target.served_name == "target"
    assert found.configuration.draft.model is not None
    assert found.configuration.draft.model.path == str(draft)
    assert found.configuration.draft.model.compile_directory == str(tmp_path / models.COMPILED)


def test_a_draft_that_comes_with_pilotfish_is_known_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "__file__", str(tmp_path / "models.py"))
    target, draft = model_directory(tmp_path / "t"), model_directory(tmp_path / "drafts" / "smollm2-135m-instruct")
    written = load({}, {"target.path": str(target), "draft.method": "model", "draft.model.path": "smollm2-135m-draft"})

    assert models.resolve_models(written, tmp_path, lambda _: None).draft == draft


def test_a_draft_whose_files_are_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "__file__", str(tmp_path / "models.py"))
    target = model_directory(tmp_path / "t")
    written = load({}, {"target.path": str(target), "draft.method": "model", "draft.model.path": "smollm2-135m-draft"})

    with pytest.raises(ModelLoadError, match="'smollm2-135m-draft': its files are not in"):
        models.resolve_models(written, tmp_path, lambda _: None)
