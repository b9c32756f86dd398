"""A model runs on the CPU kernels only if they compute its logits, in size as well as in direction."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from tests.support.engines.stored_model import TEXT, logits
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.forward.native import decoder_shape
from workers.model import kernel_handover
from workers.model.loading import load_model

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

UNSCALED = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the compiled kernels."""
    return str(tmp_path_factory.mktemp("code"))


def load(directory: Path, code: str, **settings: str) -> LoadedModel:
    values = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": code}
    return load_model(ModelSection.model_validate(values | settings))


def check_logits(model: LoadedModel, directory: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([TEXT])).logits[0]
    torch.testing.assert_close(logits(model, TEXT), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("field", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
def test_a_granite_model_with_multipliers_keeps_its_modules_and_its_logits(
    field: str, code: str, tmp_path: Path
) -> None:
    directory = tiny.save(tmp_path, tiny.granite(**(UNSCALED | {field: 8.0})))
    model = load(directory, code)
    assert model.native is None
    check_logits(model, directory)


def test_the_kernels_apply_the_attention_multiplier(code: str, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.granite(**UNSCALED))
    model = load(directory, code)
    assert model.native is not None
    check_logits(model, directory)


@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ids=["float32", "float32 int8", "bfloat16", "bfloat16 int8"],
)
@pytest.mark.parametrize("factor", [8.0, 1.25])
def test_the_trial_finds_logits_of_another_size(
    factor: float,
    settings: dict[str, str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The kernels ignore the factor, so their logits have the right direction and the wrong size."""
    monkeypatch.setattr(decoder_shape, "_UNSUPPORTED_MULTIPLIERS", ())
    directory = tiny.save(tmp_path, tiny.granite(**(UNSCALED | {"logits_scaling": factor})))
    model = load(directory, code, **settings)
    assert model.native is None
    assert "compute other logits" in caplog.text
    if not settings:
        check_logits(model, directory)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [tiny.llama(num_hidden_layers=12), tiny.qwen3()], ids=["deep llama", "qwen3"])
def test_correct_kernels_stay_far_below_the_bound(
    config: PreTrainedConfig, dtype: str, quantization: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[float] = []
    measure = kernel_handover.relative_error

    def recorded(found: torch.Tensor, expected: torch.Tensor) -> float:
        errors.append(measure(found, expected))
        return errors[-1]

    monkeypatch.setattr(kernel_handover, "relative_error", recorded)
    assert load(tiny.save(tmp_path, config), code, dtype=dtype, quantization=quantization).native is not None
    assert errors[0] < kernel_handover._MAX_RELATIVE_ERROR[getattr(torch, dtype)] / 2


def test_a_model_that_fails_the_trial_is_loaded_again(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_handover, "_MAX_RELATIVE_ERROR", {torch.float32: -1.0})
    directory = tiny.save(tmp_path, tiny.llama())
    model = load(directory, code)
    assert model.native is None
    assert "compute other logits" in caplog.text
    check_logits(model, directory)
