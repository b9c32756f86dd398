"""A stretched model costs more and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, SmolLM3Config

from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.errors import ModelLoadError
from tests.support.models import tiny
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.kernel_handover import relative_error
from workers.model.loading import load_model
from workers.model.model_files import resolve_model_directory
from workers.model.stretch import parse_stretch, read_stretch
from workers.model.weight_counts import count_weights

TOKENS = torch.tensor([[5, 17, 3, 88, 41, 7, 7, 23]])
MakeConfig = Callable[[], PreTrainedConfig]
SUFFIXES = ("x3", "wider-x10", "deeper-x5")


def stretched(directory: Path, config: PreTrainedConfig, suffix: str) -> tuple[Path, Path]:
    """The directories of a tiny model and of its stretched copy."""
    original = tiny.save(directory / "tiny", config)
    return original, resolve_model_directory(f"{original}@{suffix}", directory / "cache")


def smollm3() -> PreTrainedConfig:
    """A list says which layers have rotary positions: all but each fourth one."""
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4}
    return SmolLM3Config(**sizes, num_attention_heads=6, num_key_value_heads=3, pad_token_id=0, eos_token_id=2)


@torch.inference_mode()
def hidden_and_logits(directory: Path) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The residual stream before each layer and the logits, in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = model(TOKENS, output_hidden_states=True)
    return found.hidden_states[:-1], found.logits


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("make", [tiny.llama, tiny.qwen2, tiny.qwen3, tiny.mistral, smollm3])
def test_the_logits_are_those_of_the_original(tmp_path: Path, make: MakeConfig, suffix: str) -> None:
    original, copy = stretched(tmp_path, make(), suffix)
    (hidden, logits), (wide_hidden, wide_logits) = hidden_and_logits(original), hidden_and_logits(copy)
    assert relative_error(wide_logits, logits) < 1e-5
    stretch = read_stretch(copy)
    assert stretch is not None
    for tap, renumbered in enumerate(stretch.layers):
        assert relative_error(wide_hidden[renumbered], hidden[tap]) < 1e-5


def test_added_layers_change_no_bit(tmp_path: Path) -> None:
    original, copy = stretched(tmp_path, tiny.llama(), "deeper-x4")
    assert torch.equal(hidden_and_logits(copy)[1], hidden_and_logits(original)[1])


@pytest.mark.parametrize(("suffix", "factor"), [("x3", 3), ("wider-x10", 10), ("deeper-x5", 5)])
def test_the_cost_grows_by_the_factor(tmp_path: Path, suffix: str, factor: int) -> None:
    original, copy = stretched(tmp_path, tiny.llama(num_hidden_layers=4), suffix)
    ratio = count_weights(copy).multiply_adds / count_weights(original).multiply_adds
    assert ratio == pytest.approx(factor, rel=0.1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_cpu_kernels_run_it(tmp_path: Path, suffix: str) -> None:
    original, copy = stretched(tmp_path, tiny.llama(), suffix)

    def logits(directory: Path) -> torch.Tensor:
        section = ModelSection(path=str(directory), device="cpu", compile="off")
        model = load_model(section)
        assert model.native is not None
        pool = KvPool(model.kv_spec, PoolSection(block_size=8, pool_bytes=1 << 24), 64)
        table = pool.new_table()
        pool.reserve(table, TOKENS.shape[1])
        row = ForwardRow(table, tuple(TOKENS[0].tolist()), select=tuple(range(TOKENS.shape[1])))
        return ModelRunner(model, pool).forward([row]).float().clone()

    assert relative_error(logits(copy), logits(original)) < 1e-5


def test_the_original_layers_are_spread_over_the_deeper_model(tmp_path: Path) -> None:
    stretch = read_stretch(stretched(tmp_path, tiny.llama(num_hidden_layers=4), "deeper-x2")[1])
    assert stretch is not None and stretch.kind == "deeper" and stretch.factor == 2
    assert stretch.layers == tuple(index * stretch.total_layers // 4 for index in range(4))
    assert "made deeper to 2 times its cost" in str(stretch)


def test_the_copy_is_made_once_and_has_the_original_tokenizer_and_settings(tmp_path: Path) -> None:
    original, copy = stretched(tmp_path, tiny.llama(), "x2")
    assert resolve_model_directory(f"{original}@x2", tmp_path / "cache") == copy
    wanted = {file.name for file in original.iterdir() if file.suffix == ".json"}
    assert wanted <= {file.name for file in copy.iterdir()}
    assert read_stretch(original) is None


def test_a_path_says_how_to_stretch() -> None:
    assert parse_stretch("smollm2-135m-instruct") is None
    assert parse_stretch("owner/name@main") is None
    found = parse_stretch("owner/name@deeper-x30")
    assert found is not None and (found.path, found.kind, found.factor) == ("owner/name", "deeper", 30)


@pytest.mark.parametrize("path", ["model@x1", "model@wider-x65"])
def test_a_factor_out_of_bounds_is_refused(path: str) -> None:
    with pytest.raises(ModelLoadError, match="must be x2 to x64"):
        parse_stretch(path)


def test_a_model_without_gated_mlps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"layers|gated"):
        stretched(tmp_path, tiny.gpt2(), "x2")
