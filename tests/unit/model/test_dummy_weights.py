"""`load_format: dummy`: random weights in the shape of a model's configuration."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ConfigurationError
from tests.support.models import tiny
from workers.model.loading import load_model


@pytest.fixture
def shape_only(tmp_path: Path) -> Path:
    """A directory with the configuration of a tiny model, without weights."""
    tiny.save(tmp_path / "whole", tiny.llama())
    (tmp_path / "shape").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "shape")
    return tmp_path / "shape"


def test_dummy_weights_need_only_the_configuration_and_are_the_same_at_each_start(shape_only: Path) -> None:
    section = ModelSection(path=str(shape_only), load_format="dummy", native="off", device="cpu")
    torch.manual_seed(1)
    first = load_model(section).module.state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(1)
    second = load_model(section).module.state_dict()
    assert torch.equal(drawn, torch.rand(1)), "the caller's random numbers are not disturbed"
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_several_ranks_are_refused(shape_only: Path) -> None:
    section = ModelSection(path=str(shape_only), load_format="dummy", device="cpu")
    with pytest.raises(ConfigurationError, match=r"tensor_parallel: 3 is refused; with target.load_format: dummy"):
        load_model(section, tensor_parallel=3)
