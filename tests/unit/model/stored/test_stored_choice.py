"""`target.quantization: auto` keeps every checkpoint as it is stored, if the ranks and the device allow it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.target_section import TargetSection
from deploy import models
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import quantized, stored_gguf, tiny
from tests.support.slow import slow_but
from tests.unit.model.stored.test_stored_checkpoints import CHECKPOINTS, FAMILIES, FEW, SIZES, write
from workers.model import stored_choice
from workers.model.stored_choice import StoredChoice, choose_stored, settled
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

KEPT_AS_STORED, PLAIN = StoredChoice(is_kept=True), StoredChoice(is_kept=False)
AWQ_OF_24 = (quantized.awq(24), quantized.AWQ | {"group_size": 24})
"""A checkpoint that CPUs multiply as it is stored, and GPUs do not."""


def choice(directory: Path, *, on_gpu: bool = False, **values: Any) -> StoredChoice:
    return choose_stored(TargetSection(path=str(directory), **values), directory, on_gpu=on_gpu)


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package for products on GPUs is installed."""
    monkeypatch.setattr(stored_choice, "find_spec", lambda name: name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("plain"), FAMILIES["llama"])


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", slow_but(FEW, CHECKPOINTS))
def test_a_checkpoint_of_each_format_is_kept(name: str, ranks: int, on_gpu: bool, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", name)
    assert choice(tmp_path / "model", on_gpu=on_gpu, tensor_parallel=ranks) == KEPT_AS_STORED


def test_groups_that_gpus_do_not_multiply_are_kept_on_a_cpu(plain: Path, tmp_path: Path) -> None:
    quantized.save(plain, tmp_path / "model", *AWQ_OF_24)
    assert choice(tmp_path / "model") == KEPT_AS_STORED
    found = choice(tmp_path / "model", on_gpu=True)
    assert not found.is_kept
    assert "GPUs have no product for model.layers." in found.refusal
    assert "groups of 24 inputs; their size must be a multiple of 16" in found.refusal


@pytest.mark.parametrize(
    ("kinds", "ranks", "on_gpu"), [("Q4_0", 1, False), ("Q4_1", 3, False), ("Q8_0", 3, True), ("F16", 1, True)]
)
def test_a_gguf_file_is_kept(kinds: str, ranks: int, on_gpu: bool, tmp_path: Path) -> None:
    config = tiny.llama(**SIZES, head_dim=32)
    directory, _ = stored_gguf.convert(tmp_path, "llama", config, {}, default=kinds)
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    assert choice(directory, on_gpu=on_gpu, tensor_parallel=ranks) == KEPT_AS_STORED


def test_a_gpu_without_triton_multiplies_no_stored_weights(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_choice, "find_spec", lambda _: None)
    write(plain, tmp_path / "model", "awq")
    assert choice(tmp_path / "model") == KEPT_AS_STORED
    assert "triton, which is not installed" in choice(tmp_path / "model", on_gpu=True).refusal


def test_plain_weights_stay_plain(plain: Path) -> None:
    assert choice(plain) == PLAIN


def test_random_weights_are_plain(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", "awq")
    assert choice(tmp_path / "model", load_format="dummy") == PLAIN


def test_a_format_that_is_not_read_is_left_to_its_library(plain: Path, tmp_path: Path) -> None:
    quantized.save(plain, tmp_path / "model", quantized.compressed_int8, {"quant_method": "quanto"})
    assert choice(tmp_path / "model") == PLAIN


def test_groups_that_the_ranks_would_cut_are_dequantized(tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "plain", tiny.llama(**SIZES, head_dim=32))
    quantized.save(source, tmp_path / "model", quantized.awq(96), dict(CHECKPOINTS["awq"][1], group_size=96))
    assert choice(tmp_path / "model") == KEPT_AS_STORED
    found = choice(tmp_path / "model", tensor_parallel=6)
    assert not found.is_kept
    assert "cut groups of 96 inputs" in found.refusal


def test_quantized_experts_that_no_kernel_multiplies_are_dequantized(tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "plain", tiny.qwen3_moe())
    quantized.save(source, tmp_path / "model", quantized.awq(16), dict(CHECKPOINTS["awq"][1], group_size=16))
    found = choice(tmp_path / "model")
    assert not found.is_kept
    assert "experts are kept as they are stored in MXFP4 alone" in found.refusal


def test_ranks_that_divide_no_weights_at_all_dequantize_nothing(plain: Path, tmp_path: Path) -> None:
    """The start refuses them, before a large model is written out."""
    write(plain, tmp_path / "model", "awq")
    assert choice(tmp_path / "model", tensor_parallel=4) == KEPT_AS_STORED


def test_settings_that_are_not_read_are_named(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", "awq")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"]["version"] = "marlin"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = choice(tmp_path / "model")
    assert not found.is_kept
    assert "marlin" in found.refusal


@pytest.mark.parametrize(
    ("setting", "expected"), [("auto", "stored"), ("stored", "stored"), ("none", "none"), ("int8", "int8")]
)
def test_a_written_value_wins(setting: str, expected: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", "awq")
    values = {"target.path": str(tmp_path / "model"), "target.quantization": setting, "draft.method": "none"}
    found = models.resolve_models(load_configuration({}, values), tmp_path / "cache", lambda _: None)
    assert found.configuration.target.quantization == expected
    assert (found.target == tmp_path / "model") == (expected == "stored")


def test_one_line_says_why_weights_are_dequantized_and_what_it_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tiny.save(tmp_path / "plain", tiny.llama(**SIZES, head_dim=32))
    quantized.save(source, tmp_path / "model", *AWQ_OF_24)
    values = {"target.path": str(tmp_path / "model"), "target.device": "cuda", "draft.method": "none"}
    with caplog.at_level(logging.WARNING):
        found = models.resolve_models(load_configuration({}, values), tmp_path / "cache", lambda _: None)
    assert found.configuration.target.quantization == "none"
    assert found.target != tmp_path / "model"
    (line,) = (record.getMessage() for record in caplog.records if record.name == "deploy.models")
    assert line.startswith(f"{tmp_path / 'model'}: its weights are de-quantized and take 0.00")
    assert "GB in float32 instead of 0.000" in line
    assert "GPUs have no product for" in line


def test_a_section_that_nobody_settled_is_settled_when_it_is_loaded(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", "awq")
    values = {"path": str(tmp_path / "model"), "device": "cpu", "compile_directory": str(KEPT)}
    section = TargetSection.model_validate(values | {"kv": {"pool_bytes": 1 << 20}})
    assert settled(section).quantization == "stored"
    left, right = (build_engine(one) for one in (section, settled(section)))
    try:
        assert left.info().fingerprint == right.info().fingerprint
    finally:
        left.close()
        right.close()
