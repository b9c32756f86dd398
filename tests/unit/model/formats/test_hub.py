"""What is fetched of a repository of a model hub: all files that change what a draft computes, and weights once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import public_drafts
from workers.model.formats.hub import draft_directory
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import MaskedBlockShape


@pytest.fixture
def repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The files of the only repository of a hub."""
    stored, fetched = tmp_path / "stored", tmp_path / "fetched"
    fetched.mkdir()

    def snapshot_download(_: str, *, revision: str | None, allow_patterns: Sequence[str]) -> str:
        assert revision is None
        for file in stored.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, fetched)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return stored


@pytest.mark.parametrize(
    ("weights", "beside"), [("model.safetensors", ("pytorch_model.bin",)), ("pytorch_model.bin", ())]
)
def test_a_block_drafter_with_a_mask_embedding(weights: str, beside: Sequence[str], repository: Path) -> None:
    public_drafts.write(repository, public_drafts.DFLASH, public_drafts.block(), weights)
    other: dict[str, Any] = {"embedding": torch.zeros(public_drafts.HIDDEN), "mask_token_id": public_drafts.MASK}
    torch.save(other, repository / "mask_embedding.pt")
    for name in (*beside, "training_state.pt"):
        torch.save({}, repository / name)

    directory = draft_directory("owner/name")

    assert {file.name for file in directory.iterdir()} == {"config.json", weights, "mask_embedding.pt"}
    shape = read_draft(directory).shape
    assert isinstance(shape, MaskedBlockShape) and shape.has_mask_embedding
