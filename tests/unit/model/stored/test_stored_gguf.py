"""A GGUF file is served as it is stored: the logits are those of its de-quantized float32 weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.settings import load_settings
from tests.support.engines.stored_model import TEXT, check_kept, check_logits, load, logits
from tests.support.models import stored_gguf, tiny
from workers.forward.attention import register
from workers.forward.weights.modules import StoredLinear
from workers.model.model_files import resolve_model_directory
from workers.model.packed_weights.store import packed_file
from workers.model.share import Share
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.loading import load_stored

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
FAMILIES: dict[str, tuple[str, PreTrainedConfig]] = {
    "llama": ("llama", tiny.llama(**SIZES, num_attention_heads=6, num_key_value_heads=3)),
    "qwen2": ("qwen2", tiny.FAMILIES["qwen2"](**SIZES, num_attention_heads=6, num_key_value_heads=3)),
    "qwen3": ("qwen3", tiny.FAMILIES["qwen3"](**SIZES, num_attention_heads=6, num_key_value_heads=3)),
}
MIXED = {"embed_tokens": "Q8_0", "lm_head": "Q8_0", "v_proj": "Q5_1", "up_proj": "Q4_0", "down_proj": "Q8_0"}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of compiled kernels, for all tests of this file."""
    return str(tmp_path_factory.mktemp("code"))


def converted(directory: Path, family: str, kinds: dict[str, str] = MIXED) -> tuple[Path, torch.Tensor]:
    """A model's directory as the conversion of a GGUF file leaves it, and the reference's logits of `TEXT`."""
    path, reference = stored_gguf.convert(directory, *FAMILIES[family], kinds)
    with torch.inference_mode():
        return path, reference(torch.tensor([TEXT])).logits[0]


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_dequantized_weights(family: str, native: str, code: str, tmp_path: Path) -> None:
    path, expected = converted(tmp_path, family)
    model = load(path, code, native=native)
    assert (model.native is not None) is (native == "auto" and shutil.which("cc") is not None)
    check_logits(model, expected)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("plain", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_matrices_take_the_type_of_the_model(
    dtype: str, plain: str, native: str, code: str, tmp_path: Path
) -> None:
    kinds = MIXED | {"embed_tokens": plain, "lm_head": plain, "v_proj": plain, "gate_proj": plain}
    path, expected = converted(tmp_path, "llama", kinds)
    found = logits(load(path, code, dtype=dtype, native=native), TEXT)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < (0.05 if dtype == "bfloat16" else 1e-4)


def test_keys_and_values_may_be_bfloat16(code: str, tmp_path: Path) -> None:
    path, expected = converted(tmp_path, "llama")
    found = logits(load(path, code, dtype="bfloat16"), TEXT)
    error = (found - expected).norm() / expected.norm()
    assert float(error) < 0.05


def test_packed_weights_take_the_bytes_of_the_file(code: str, tmp_path: Path) -> None:
    path, _ = converted(tmp_path, "llama", {"embed_tokens": "Q8_0", "lm_head": "Q8_0"})
    whole, stored = (load(path, code, quantization=how).native for how in ("none", "stored"))
    sizes = [sum(part.nbytes for part in native.packed.memory) for native in (whole, stored)]  # type: ignore[union-attr]
    assert sizes[1] < 0.3 * sizes[0]


def test_a_directory_that_was_not_converted_is_refused(code: str, tmp_path: Path) -> None:
    path = tiny.save(tmp_path, tiny.llama())
    with pytest.raises(ConfigurationError, match=r"no converted GGUF file; it must be none or int8"):
        load(path, code)


def test_a_file_that_is_gone_is_named(code: str, tmp_path: Path) -> None:
    path, _ = converted(tmp_path, "llama")
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.gguf' that its weights are stored in is gone; put it back"):
        load(path, code)


def test_three_ranks_hold_the_whole_together(tmp_path: Path) -> None:
    path, _ = converted(tmp_path, "llama")
    register()
    config = AutoConfig.from_pretrained(path)

    def held(share: Share) -> dict[str, StoredLinear]:
        def make() -> PreTrainedModel:
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

        model = load_stored(make, tmp_path / "model.gguf", torch.float32, share)
        return {name: part for name, part in model.named_modules() if isinstance(part, StoredLinear)}

    whole, ranks = held(Share(0, 1)), [held(Share(rank, 3)) for rank in range(3)]
    assert sum(layer.sums_ranks for layer in ranks[0].values()) == 2 * config.num_hidden_layers
    for name, layer in whole.items():
        parts = [rank[name].storage.dequantized() for rank in ranks]
        dim = 1 if ranks[0][name].sums_ranks else 0
        assert torch.equal(torch.cat(parts, dim=dim), layer.storage.dequantized()), name


def test_ranks_that_cut_a_group_are_refused(tmp_path: Path) -> None:
    path, _ = converted(tmp_path, "llama")
    config = AutoConfig.from_pretrained(path)
    with pytest.raises(
        ConfigurationError, match=r"tensor_parallel: 4 is refused: .* cut groups of 32 inputs into parts"
    ):
        load_stored(
            lambda: AutoModelForCausalLM.from_config(config), tmp_path / "model.gguf", torch.float32, Share(0, 4)
        )


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"architecture 'rwkv6' is not read as it is stored; it must be"):
        GgufFile(tmp_path / "model.gguf")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_weights_are_kept_on_disk_and_compute_the_same_bits(family: str, code: str, tmp_path: Path) -> None:
    path, _ = converted(tmp_path, family)
    values = {"path": str(path), "device": "cpu", "compile": "off", "compile_directory": code, "quantization": "stored"}
    section = TargetSection.model_validate(values)
    file = packed_file(section)
    check_kept(section)
    (tmp_path / "model.gguf").touch()
    assert packed_file(section) != file


@pytest.mark.weights
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_a_packaged_model_decides_as_its_dequantized_weights(name: str, code: str) -> None:
    path = resolve_model_directory(name, load_settings().cache_directory)
    text = tuple(7919 * index % 40000 + 3 for index in range(1, 48))
    check_logits(load(path, code), logits(load(path, code, quantization="none"), text), text)
