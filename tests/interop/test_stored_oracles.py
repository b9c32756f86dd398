"""Outputs that a library computes again are compared with all tensors that are stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.interop.stored_oracles import DRAFTS, SPECULATORS, TRANSFORMERS, StoredOracle, compare

ORACLES = (*SPECULATORS, *TRANSFORMERS)


@pytest.mark.parametrize("oracle", ORACLES, ids=lambda one: one.folder)
def test_stored_outputs_are_equal_to_themselves(oracle: StoredOracle) -> None:
    assert (DRAFTS / oracle.script).is_file()
    assert compare(DRAFTS / oracle.folder, DRAFTS / oracle.folder) == (True, "largest difference 0.0e+00")


def test_every_stored_output_has_an_oracle_that_writes_it_again() -> None:
    stored = {str(file.parent.relative_to(DRAFTS)) for file in DRAFTS.rglob("expected.safetensors")}
    assert stored == {one.folder for one in ORACLES}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["step_2"].add_(1e-3), "step_2 differs by 1.0e-03"),
        (lambda tensors: tensors["tokens"].add_(1), "tokens differs by 1.0e+00"),
        (lambda tensors: tensors["step_1"].fill_(float("nan")), "step_1 differs by nan"),
        (lambda tensors: tensors.update(step_0=torch.zeros(1)), "step_0 is [1], stored is [10, 24]"),
        (
            lambda tensors: tensors.pop("step_0"),
            "expected.safetensors has ['features', 'step_1', 'step_2', ",
        ),
    ],
)
def test_another_output_is_found(change: object, message: str, tmp_path: Path) -> None:
    stored = DRAFTS / "mtp" / "speculators"
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "expected.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "expected.safetensors")

    is_same, said = compare(stored, tmp_path)

    assert not is_same and said.startswith(message)
