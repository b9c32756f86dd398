"""A checkpoint with quantized weights is served as it is stored: its answers are those of its de-quantized weights."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma4TextConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.engines.graph_replay import gemma3
from tests.support.engines.stored_model import TEXT, check_close, check_kept, check_logits, load, logits
from tests.support.models import quantized, tiny
from tests.support.models.quantized import compressed_fp8_settings as compressed_fp8
from tests.support.models.quantized import compressed_settings as compressed
from tests.support.models.quantized import gptq_settings as gptq
from tests.support.slow import slow_but
from workers.forward.attention import register
from workers.forward.weights.modules import StoredEmbedding, StoredLinear
from workers.model.model_files import resolve_model_directory
from workers.model.sharding import complete_plan
from workers.model.share import Share
from workers.model.stored.loading import Division, load_stored

SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": tiny.llama(**SIZES, head_dim=32),
    "qwen2": tiny.qwen2(**SIZES),
    "qwen3": tiny.qwen3(**SIZES, head_dim=32),
    "gemma3": gemma3(),
    "phi3": Phi3Config(**SIZES, vocab_size=tiny.VOCABULARY, num_hidden_layers=2, pad_token_id=0, eos_token_id=2),
}


AWQ, NF4, FP8 = quantized.AWQ, quantized.NF4, quantized.FP8 | {"weight_block_size": [64, 32]}
CHECKPOINTS = quantized.checkpoints(32, (64, 32))
FEW = ("awq", "gptq in activation order", "compressed-tensors 4 bits", "bitsandbytes nf4", "fp8 in blocks")
"""One checkpoint of each quantization method, for the tests that run on every change."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of compiled kernels, for all tests of this file."""
    return str(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The plain model of each family, which is made once."""
    directory = tmp_path_factory.mktemp("plain")

    def source(family: str) -> Path:
        path = directory / family
        return path if path.is_dir() else tiny.save(path, FAMILIES[family], sharpness=2.0)

    return source


def write(source: Path, path: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a quantized checkpoint to `path`. Returns its de-quantized weights."""
    return quantized.save(source, path, *CHECKPOINTS[name])


def written(source: Path, path: Path, name: str) -> torch.Tensor:
    """Write a quantized checkpoint to `path`. Returns the logits of `TEXT` by its de-quantized weights in float32."""
    plain = write(source, path, name)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    reference.load_state_dict(plain, strict=False)
    with torch.inference_mode():
        found: torch.Tensor = reference(torch.tensor([TEXT])).logits[0]
    return found


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("name", slow_but(FEW, CHECKPOINTS))
def test_logits_are_those_of_the_dequantized_weights_and_no_neighbour_changes_a_bit(
    name: str, native: str, code: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = written(sources("llama"), tmp_path / "model", name)
    model = load(tmp_path / "model", code, native=native)
    assert (model.native is not None) is (native == "auto" and shutil.which("cc") is not None)
    check_logits(model, expected)


@pytest.mark.parametrize("name", ["awq", "gptq 4 bits", "compressed-tensors 4 bits"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "phi3"])
def test_families_with_biases_norms_tied_heads_and_joined_layers_are_read(
    family: str, name: str, code: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    if family == "gemma3":  # its layers have 48 inputs
        bits = CHECKPOINTS[name][1]
        quantize = {"awq": quantized.awq(16), "gptq 4 bits": quantized.gptq(4, 16)}.get(
            name, quantized.compressed_packed(4, 16)
        )
        plain = quantized.save(sources(family), tmp_path / "model", quantize, {**bits, "group_size": 16})
        reference = AutoModelForCausalLM.from_pretrained(sources(family), dtype=torch.float32).eval()
        reference.load_state_dict(plain, strict=False)
        with torch.inference_mode():
            expected = reference(torch.tensor([TEXT])).logits[0]
    else:
        expected = written(sources(family), tmp_path / "model", name)
    check_close(logits(load(tmp_path / "model", code), TEXT), expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_matrices_take_the_bytes_of_their_integers(name: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    write(sources("llama"), tmp_path / "model", name)
    bits = 8 if "8 bits" in name or "int8" in name or "fp8" in name else 4
    for layer in held(tmp_path / "model", Share(0, 1)).values():
        if isinstance(layer, StoredEmbedding) or layer.out_features == tiny.VOCABULARY:
            continue
        numbers = layer.in_features * layer.out_features
        of_groups = numbers // 32 * 4  # a scale and a zero of 16 bits each
        shared = layer.storage.nbytes_of(0)  # the order of inputs, or a table
        assert layer.storage.nbytes - shared <= numbers * bits // 8 + of_groups


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", slow_but(FEW, CHECKPOINTS))
def test_packed_weights_are_as_small_and_are_kept_on_disk(
    name: str, code: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    write(sources("llama"), tmp_path / "model", name)
    plain = load(sources("llama"), code, quantization="none").native
    values = {"path": str(tmp_path / "model"), "device": "cpu", "compile": "off", "compile_directory": code}
    section = TargetSection.model_validate(values | {"quantization": "stored"})
    model = check_kept(section)
    whole, stored = (sum(part.nbytes for part in native.packed.memory) for native in (plain, model.native))  # type: ignore[union-attr]
    assert stored < (0.40 if "8 bits" in name or "int8" in name or "fp8" in name else 0.32) * whole


def held(path: Path, share: Share) -> dict[str, StoredLinear]:
    """The linear layers of one rank."""
    register()
    config = AutoConfig.from_pretrained(path)

    def make() -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    complete_plan(config, share)
    model = load_stored(make, path, torch.float32, share)
    return {name: part for name, part in model.named_modules() if isinstance(part, StoredLinear)}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", slow_but((*FEW, "compressed-tensors in activation order"), CHECKPOINTS))
def test_ranks_hold_the_whole_together(name: str, ranks: int, sources: Callable[[str], Path], tmp_path: Path) -> None:
    write(sources("llama"), tmp_path / "model", name)
    whole = held(tmp_path / "model", Share(0, 1))
    parts = [held(tmp_path / "model", Share(rank, ranks)) for rank in range(ranks)]
    assert sum(layer.sums_ranks for layer in parts[0].values()) == 4
    for key, layer in whole.items():
        own = [part[key].storage.dequantized() for part in parts]
        assert torch.equal(torch.cat(own, dim=1 if parts[0][key].sums_ranks else 0), layer.storage.dequantized()), key


@pytest.mark.parametrize("name", ["awq", "gptq 8 bits", "compressed-tensors int8"])
def test_two_ranks_share_each_kv_head_where_there_are_twice_as_many_ranks(
    name: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    write(sources("llama"), tmp_path / "model", name)
    whole = held(tmp_path / "model", Share(0, 1))
    for rank in range(6):
        own = held(tmp_path / "model", Share(rank, 6))
        for key in (key for key in whole if key.endswith(("k_proj", "v_proj"))):
            head = whole[key].storage.dequantized()[rank // 2 * 32 : (rank // 2 + 1) * 32]
            assert torch.equal(own[key].storage.dequantized(), head), key


@pytest.mark.parametrize("name", slow_but(["awq"], ["awq", "gptq in activation order", "compressed-tensors 4 bits"]))
def test_ranks_have_different_numbers_of_heads_where_they_share_a_kv_head(name: str, tmp_path: Path) -> None:
    """Three query heads read each of two KV heads: of four ranks, two have one of them, and two have two."""
    config = tiny.llama(**(SIZES | {"num_key_value_heads": 2, "intermediate_size": 256}), head_dim=32)
    write(tiny.save(tmp_path / "plain", config), tmp_path / "model", name)
    whole = held(tmp_path / "model", Share(0, 1))
    parts = [held(tmp_path / "model", Share(rank, 4)) for rank in range(4)]
    for key in (key for key in whole if key.endswith(("q_proj", "o_proj"))):
        own = [part[key].storage.dequantized() for part in parts]
        is_cut = key.endswith("o_proj")
        assert [one.shape[is_cut] // 32 for one in own] == [1, 2, 1, 2]
        assert torch.equal(torch.cat(own, dim=int(is_cut)), whole[key].storage.dequantized()), key


def test_ranks_that_cut_a_group_are_refused(sources: Callable[[str], Path], tmp_path: Path) -> None:
    write(sources("llama"), tmp_path / "model", "awq")
    with pytest.raises(ConfigurationError, match=r"o_proj: inputs 0 to 48 cut groups of 32 inputs into parts"):
        held(tmp_path / "model", Share(0, 4))


@pytest.mark.parametrize("name", slow_but(["awq", "fp8 in blocks", "gptq in activation order"], CHECKPOINTS))
def test_ranks_hold_parts_of_fused_projections(name: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    """Each rank has its heads of queries, keys and values, its gates and its columns, one after another."""
    write(sources("phi3"), tmp_path / "model", name)
    whole = held(tmp_path / "model", Share(0, 1))
    parts = [held(tmp_path / "model", Share(rank, 3)) for rank in range(3)]
    assert sum(layer.sums_ranks for layer in parts[0].values()) == 4
    sections = {"qkv_proj": (96, 48, 48), "gate_up_proj": (192, 192)}
    for key, layer in whole.items():
        own = [part[key].storage.dequantized() for part in parts]
        wanted, fused = layer.storage.dequantized(), sections.get(key.rpartition(".")[2])
        if fused is not None:
            thirds = [torch.split(one, [size // 3 for size in fused]) for one in own]
            own = [torch.cat(section) for section in zip(*thirds, strict=True)]
        assert torch.equal(torch.cat(own, dim=1 if parts[0][key].sums_ranks else 0), wanted), key


def test_a_family_with_layers_of_its_own_kind_is_refused_for_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"tensor_parallel: 3 is refused for stored weights of .* 'gpt2'"):
        Division(AutoModelForCausalLM.from_config(tiny.gpt2()), Share(0, 3))


def test_layers_that_were_not_converted_stay_plain(code: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources("llama")
    write(source, tmp_path / "model", "awq")
    file = tmp_path / "model" / "model.safetensors"
    tensors, plain = load_file(file), load_file(source / "model.safetensors")
    kept = [key for key in plain if "layers.0.mlp" in key or "layers.1.self_attn.v_proj" in key]
    for key in kept:
        module = key.removesuffix(".weight")
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{module}.{part}"]
        tensors[key] = plain[key]
    save_file(tensors, file)
    directory = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")  # de-quantized
    assert {key for key in kept if torch.equal(load_file(directory / "model.safetensors")[key], plain[key])} == {*kept}
    check_close(logits(load(tmp_path / "model", code), TEXT), logits(load(directory, code, quantization="none"), TEXT))


def test_a_long_load_says_how_far_it_is(
    sources: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(sources("llama"), tmp_path / "model", "awq")
    config = AutoConfig.from_pretrained(tmp_path / "model")
    seconds = count(0, 3)
    with caplog.at_level(logging.INFO):
        load_stored(
            lambda: AutoModelForCausalLM.from_config(config),
            tmp_path / "model",
            torch.float32,
            Share(0, 1),
            clock=lambda: next(seconds),
        )
    shares = [int(share) for share in re.findall(r"model: (\d+)% of its modules are read", caplog.text)]
    assert len(shares) > 2
    assert shares == sorted(shares)


def test_the_directory_itself_is_served(sources: Callable[[str], Path], tmp_path: Path) -> None:
    write(sources("llama"), tmp_path / "model", "awq")
    found = resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache", stored=True)
    assert found == tmp_path / "model"
    assert not (tmp_path / "cache").exists()


def test_buffers_that_the_files_have_are_read(tmp_path: Path) -> None:
    """Gemma 4 multiplies what each layer returns by a buffer of the layer."""
    kinds = ["sliding_attention", "full_attention"]
    shape = {"vocab_size": tiny.VOCABULARY, "vocab_size_per_layer_input": tiny.VOCABULARY, "num_hidden_layers": 2}
    heads = {"head_dim": 32, "global_head_dim": 32, "hidden_size_per_layer_input": 0, "layer_types": kinds}
    source = tiny.save(tmp_path / "plain", Gemma4TextConfig(**SIZES, **shape, **heads), sharpness=2.0)
    tensors = load_file(source / "model.safetensors")
    factors = [name for name in tensors if name.endswith("layer_scalar")]
    assert len(factors) == 2
    tensors |= {name: torch.tensor([0.25 + number]) for number, name in enumerate(factors)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    expected = written(source, tmp_path / "model", "awq")

    def make() -> PreTrainedModel:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"), dtype=torch.float32)

    found = load_stored(make, tmp_path / "model", torch.float32, Share(0, 1))
    with torch.inference_mode():
        check_close(found(torch.tensor([TEXT])).logits[0], expected)


def test_a_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    kinds = {"layer_types": ["full_attention"], "hidden_size_per_layer_input": 0}
    shape = {"vocab_size": tiny.VOCABULARY, "vocab_size_per_layer_input": tiny.VOCABULARY, "num_hidden_layers": 1}
    source = tiny.save(tmp_path / "plain", Gemma4TextConfig(**SIZES, **shape, **kinds, head_dim=32, global_head_dim=32))
    write(source, tmp_path / "model", "awq")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.layer_scalar": torch.ones(2)}, file)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    with pytest.raises(ModelLoadError, match=r"'model\.layers\.0\.layer_scalar' is \[2\]; it must be \[1\]"):
        load_stored(lambda: AutoModelForCausalLM.from_config(config), tmp_path / "model", torch.float32, Share(0, 1))


UP = "model.layers.1.mlp.up_proj"
POISONED: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "words of another size": (
        "awq",
        lambda tensors: tensors.update({f"{UP}.qzeros": tensors[f"{UP}.qzeros"][:, :-1].contiguous()}),
        r"up_proj': qzeros is \[3, 23\]; it must be \[3, 24\]",
    ),
    "floats for words": (
        "gptq 4 bits",
        lambda tensors: tensors.update({f"{UP}.qweight": tensors[f"{UP}.qweight"].float()}),
        r"up_proj': qweight is float32; it must be int32",
    ),
    "integers for scales": (
        "awq",
        lambda tensors: tensors.update({f"{UP}.scales": tensors[f"{UP}.scales"].int()}),
        r"up_proj': scales is int32; it must be float16 or bfloat16 or float32",
    ),
    "a missing part": (
        "gptq 4 bits",
        lambda tensors: tensors.pop(f"{UP}.scales"),
        r"up_proj': scales is missing",
    ),
    "a group that does not exist": (
        "gptq in activation order",
        lambda tensors: tensors[f"{UP}.g_idx"].__setitem__(5, 3),
        r"up_proj': g_idx has 0 to 3; it must have 0 to 2",
    ),
    "another matrix's shape": (
        "compressed-tensors 4 bits",
        lambda tensors: tensors[f"{UP}.weight_shape"].__setitem__(0, 64),
        r"up_proj\.weight' is \[64, 96\]; it must be \[192, 96\]",
    ),
    "packed for other bits": (
        "compressed-tensors 4 bits",
        lambda tensors: tensors.update({f"{UP}.weight_packed": tensors[f"{UP}.weight_packed"].repeat(1, 2)}),
        r"up_proj': weight_packed is \[192, 24\] for 192 outputs of 96 inputs; it must be \[192, 12\] in 4 bits",
    ),
    "groups of different sizes": (
        "compressed-tensors 4 bits symmetric",
        lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(192, 5)}),
        r"up_proj': weight_scale has 5 groups of 96 inputs; their number must divide the inputs",
    ),
    "a plain matrix of integers": (
        "awq",
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}),
        r"'lm_head\.weight' is torch\.int8 and has no scale that is read; it must be float32, bfloat16 or float16",
    ),
    "a float that is no number": (
        "fp8 in blocks",
        lambda tensors: tensors[f"{UP}.weight"].view(torch.uint8)[7].fill_(0xFF),
        r"up_proj': weight has values that are not numbers",
    ),
    "blocks of another size": (
        "fp8 in blocks",
        lambda tensors: tensors.update({f"{UP}.weight_scale_inv": torch.ones(1, 1)}),
        r"up_proj': weight_scale_inv is \[1, 1\]; it must be \[3, 3\]",
    ),
    "a table of another size": (
        "bitsandbytes nf4",
        lambda tensors: tensors.update({f"{UP}.weight.quant_map": torch.ones(15)}),
        r"up_proj': weight\.quant_map is \[15\]; it must be \[16\]",
    ),
    "the order of a GPU's tiles": (
        "bitsandbytes 8 bits",
        lambda tensors: tensors.update({f"{UP}.weight_format": torch.tensor(3, dtype=torch.uint8)}),
        r"up_proj': weight_format is 3; it must be 0, whose numbers lie row by row",
    ),
    "a state that is no JSON": (
        "bitsandbytes nf4",
        lambda tensors: tensors[f"{UP}.weight.quant_state.bitsandbytes__nf4"].fill_(7),
        r"up_proj': Expecting value",
    ),
    "a bias that the configuration does not state": (
        "gptq 4 bits",
        lambda tensors: tensors.update({f"{UP}.bias": torch.ones(192)}),
        r"up_proj\.bias is no parameter of the model; its configuration must state it",
    ),
    "no head": ("awq", lambda tensors: tensors.pop("lm_head.weight"), r"there is no tensor for 'lm_head\.weight'"),
}


@pytest.mark.parametrize("what", POISONED)
def test_a_poisoned_tensor_is_named_with_its_bound(
    what: str, code: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    name, poison, message = POISONED[what]
    write(sources("llama"), tmp_path / "model", name)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    poison(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "model", code)


def test_a_shape_that_the_words_do_not_have_is_refused_before_memory_is_taken(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    write(sources("llama"), tmp_path / "model", "compressed-tensors 4 bits")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.weight_shape"][1] = 1 << 40
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"weight_packed is \[192, 12\] for 192 outputs of 1099511627776 inputs"):
        resolve_model_directory(str(tmp_path / "model"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, r"quant_method is 'hqq'; weights are kept as they are stored for awq"),
        ({"quant_method": "bitsandbytes"}, r"load_in_4bit and load_in_8bit are false; one must be true"),
        (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, r"bnb_4bit_quant_storage is 'bfloat16'; it must be uint8"),
        (AWQ | {"version": "gemv"}, r"weights of 'awq' are refused: .*version is 'gemv'; it must be gemm"),
        (AWQ | {"bits": 8}, r"bits is 8; it must be 4"),
        (AWQ | {"zero_point": False}, r"zero_point is false; it must be true"),
        (AWQ | {"group_size": 0}, r"group_size is 0; it must be -1 or at least 1"),
        (gptq(5), r"bits is 5; it must be 2 or 3 or 4 or 8"),
        (gptq(4, checkpoint_format="marlin"), r"checkpoint_format is 'marlin'; it must be gptq or gptq_v2"),
        (gptq(4, dynamic=[1]), r"dynamic is \[1\]; it must have fields for patterns"),
        (gptq(4, dynamic={"+:(": {"bits": 8}}), r"dynamic has '\+:\(', which is no pattern"),
        (compressed(4, "marlin-24"), r"format is 'marlin-24'; it must be pack-quantized or int-quantized or float"),
        (
            compressed(4) | {"format": ["pack-quantized"]},
            r"format is \['pack-quantized'\]; it must be pack-quantized or",
        ),
        (compressed(4) | {"sparsity_config": "dense"}, r"sparsity_config is set; it must be empty"),
        (compressed_fp8(type="int"), r"weights has 8 bits of type 'int'; it must have 8 of float"),
        (FP8 | {"fmt": "e5m2"}, r"fmt is 'e5m2'; it must be e4m3"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]; it must have two sizes of at least 1"),
        (compressed(4) | {"transform_config": {"R1": {}}}, r"transform_config is set; it must be empty"),
        (compressed(3), r"config_groups\.group_0\.weights has 3 bits of type 'int'; it must have 2 or 4 or 8 of int"),
    ],
)
def test_settings_that_are_not_read_are_refused_before_any_weight_is(
    settings: dict[str, Any], message: str, code: str, sources: Callable[[str], Path], tmp_path: Path
) -> None:
    quantized.save(sources("llama"), tmp_path / "model", quantized.awq(32), settings)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"none")  # it would be refused, too
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path / "model", code)


def test_layers_may_have_bits_of_their_own(code: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    source = sources("llama")
    expected = written(source, tmp_path / "model", "gptq 4 bits")
    plain = load_file(source / "model.safetensors")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    parts, weight = quantized.gptq(8, 32)(plain[f"{UP}.weight"])
    tensors |= {f"{UP}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, file)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    config.quantization_config = gptq(4, dynamic={r"+:.*layers\.1\.mlp\.up_proj": {"bits": 8}})
    config.save_pretrained(tmp_path / "model")
    assert torch.equal(held(tmp_path / "model", Share(0, 1))[UP].storage.dequantized(), weight)
    error = (logits(load(tmp_path / "model", code), TEXT) - expected).norm() / expected.norm()
    assert 0.0 < float(error) < 0.2
