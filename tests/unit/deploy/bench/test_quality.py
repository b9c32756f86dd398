"""The benchmark of quality reads a model with the settings that a target would be served with, or refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from deploy.bench.agreement.positions import Text
from tests.bench.sections.target.quality import ReadingModel, closeness
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import stored_gguf, tiny

TEXT = torch.tensor([[(7 * index) % 90 + 3 for index in range(40)]])


def section_of(directory: Path, **values: object) -> TargetSection:
    usual = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(KEPT)}
    return TargetSection.model_validate(usual | {"quantization": "none"} | values)


def test_stored_keys_and_values_have_the_configured_type(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    expected = ReadingModel(section_of(directory))(TEXT, use_cache=False).logits
    for kv, most in (("int8", 0.02), ("fp8", 0.06)):
        found = ReadingModel(section_of(directory, kv={"dtype": kv}))(TEXT, use_cache=False).logits
        difference = (found - expected).abs().max() / (expected.max() - expected.min())
        assert 1e-5 < float(difference) < most


def test_a_window_hides_positions(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    whole, windowed = (
        ReadingModel(section_of(directory, kv=kv))(TEXT, use_cache=False).logits[0]
        for kv in ({}, {"window": 16, "sinks": 0})
    )
    assert torch.allclose(windowed[:16], whole[:16], atol=1e-4)
    assert not torch.allclose(windowed[-1], whole[-1], atol=1e-2)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.tensor_parallel: 3 is refused; for `quality` it must be 1"):
        ReadingModel(section_of(tmp_path, tensor_parallel=3))


def test_stored_weights_agree_with_the_dequantized_ones_and_others_do_not(tmp_path: Path) -> None:
    shape = {"hidden_size": 96, "intermediate_size": 96, "head_dim": 32}
    kinds = {"embed_tokens": "Q8_0", "lm_head": "Q8_0"}
    path, dequantized = stored_gguf.convert(tmp_path, "llama", tiny.llama(**shape), kinds)
    dequantized.save_pretrained(tmp_path / "dequantized")

    def model(directory: Path, quantization: str) -> ReadingModel:
        return ReadingModel(section_of(directory, quantization=quantization))

    reference, texts = model(tmp_path / "dequantized", "none"), [Text(tuple(range(3, 90)), 1), Text((5, 9, 7, 5), 2)]
    stored = closeness(reference, model(path, "stored"), texts)
    assert (stored.agreement.positions, stored.agreement.share_within(1)) == (86 + 2, 1.0)
    assert stored.agreement.draft_perplexity == pytest.approx(stored.agreement.target_perplexity, rel=1e-3)
    assert 0 < stored.largest_difference < 1e-3
    other = closeness(reference, model(path, "none"), texts)  # the weights before they were quantized
    assert other.agreement.share_within(1) < 1
    assert other.largest_difference > 1e-2
