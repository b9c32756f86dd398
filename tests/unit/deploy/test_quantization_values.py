"""What each value of `target.quantization` does with quantized and with plain weights, and how a wrong one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError
from deploy.models import resolve_models
from tests.support.engines.engine_sequence import generate
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import quantized, stored_gguf, tiny
from tests.support.terminal import run_command
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model with plain weights, in AWQ, and in a GGUF file."""
    path = tmp_path_factory.mktemp("models")
    config = tiny.llama(**SIZES, head_dim=32)
    plain = tiny.save(path / "plain", config)
    quantized.save_with_tokenizer(plain, path / "awq", quantized.awq(32), quantized.AWQ)
    (path / "of_gguf").mkdir()
    gguf, _ = stored_gguf.convert(path / "of_gguf", "llama", config, {}, default="Q4_0")
    for file in gguf.glob("*.safetensors"):
        file.unlink()
    return {"plain": plain, "awq": path / "awq", "gguf": gguf}


def values(path: Path, quantization: str) -> dict[str, object]:
    found = {"path": str(path), "quantization": quantization, "device": "cpu", "kv.pool_bytes": 1 << 20}
    found |= {"compile": "off", "compile_directory": str(KEPT)}
    return {f"target.{name}": value for name, value in found.items()} | {"draft.method": "none"}


@pytest.mark.parametrize(
    ("name", "quantization", "settled"),
    [
        *(("awq", value, settled) for value, settled in (("auto", "stored"), ("stored", "stored"))),
        *(("awq", value, value) for value in ("none", "int8")),
        *(("plain", value, settled) for value, settled in (("auto", "none"), ("none", "none"), ("int8", "int8"))),
        *(("gguf", value, "stored") for value in ("auto", "stored")),
    ],
)
def test_each_value_serves(name: str, quantization: str, settled: str, models: dict[str, Path], tmp_path: Path) -> None:
    configuration = load_configuration({}, values(models[name], quantization))
    found = resolve_models(configuration, tmp_path / "cache", lambda _: None)
    assert found.configuration.target.quantization == settled
    assert (found.target == models[name]) == (name != "awq" or settled == "stored")
    engine = build_engine(found.configuration.target)
    try:
        assert len(generate(engine, [5, 17, 33], 4)) == 4
    finally:
        engine.close()


def test_plain_weights_that_are_to_stay_as_they_are_stored_are_refused_before_anything_starts(
    models: dict[str, Path], tmp_path: Path
) -> None:
    configuration = load_configuration({}, values(models["plain"], "stored"))
    refused = r"target\.quantization: stored is refused for .*plain, whose weights are plain; it must be auto, none or"
    with pytest.raises(ConfigurationError, match=refused):
        resolve_models(configuration, tmp_path, lambda _: None)


@pytest.mark.parametrize("command", ["plan", "doctor"])
@pytest.mark.parametrize(("name", "is_refused"), [("plain", True), ("awq", False), ("gguf", False)])
def test_commands_that_start_nothing_name_them_too(
    command: str, name: str, is_refused: bool, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"target.path={models[name]}", "target.quantization=stored", "draft.method=none", "target.device=cpu"]
    run_command(command, *(word for setting in words for word in ("--set", setting)))
    said = " ".join(capsys.readouterr().out.split())
    assert ("has plain weights" in said) == is_refused
    assert ("set it to auto, none or int8" in said) == is_refused


def test_a_value_of_drafts_alone_is_refused_with_those_of_targets(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigurationError, match=r"target\.quantization: .*'?int4'?.*auto.*none.*int8.*stored"):
        load_configuration({}, values(models["awq"], "int4"))
