"""Weights that stay as they are stored count as the bytes that they take, wherever memory is planned."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral3Config, PreTrainedConfig, T5Config

from cluster.core.config.target_section import TargetSection
from deploy import preflight
from deploy.bench.measuring import costs
from deploy.bench.measuring.costs import configuration_cost
from deploy.distillation.training_plan import print_plan
from deploy.placement import Resources, plan
from tests.bench.machine import weight_bytes
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.stored_model import check_kept, load
from tests.support.models import quantized, stored_gguf, tiny
from tests.support.slow import slow_but
from tests.unit.model.stored.test_stored_checkpoints import CHECKPOINTS, FAMILIES, FEW, SIZES, write
from workers.distill.options import DistillOptions
from workers.forward.attention import register
from workers.forward.gpu_product import GpuProduct
from workers.forward.native.decoder import NativeDecoder
from workers.forward.weights.base import NoGpuProduct, Storage
from workers.forward.weights.gathered import GatheredStorage
from workers.forward.weights.modules import StoredEmbedding, StoredLinear
from workers.model.rank_bytes import rank_bytes
from workers.model.sharding import complete_plan
from workers.model.share import Share
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.loading import load_stored
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint, stored_bytes
from workers.model.stored.source import write_stored_in
from workers.model.weight_counts import count_weights
from workers.serve.configuration import load_configuration

WHOLE = Share(0, 1)
TYPES = {"embed_tokens": "Q8_0", "lm_head": "F16", "v_proj": "Q5_1", "up_proj": "Q4_0", "down_proj": "Q5_0"}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a storage, or of another value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def on_a_gpu(storage: Storage) -> Any:
    """What a GPU holds of a matrix that it multiplies with."""
    if isinstance(storage, GatheredStorage):
        return storage.kernel_of(lambda columns: GpuProduct(columns.words(), None))
    try:
        return storage.words()
    except NoGpuProduct:
        return storage


def held_bytes(module: Any, *, on_gpu: bool = False) -> int:
    """Bytes of the tensors of a model's weights, before matrices are packed, or once they are on a GPU."""
    linears = [layer for layer in module.modules() if isinstance(layer, StoredLinear)]
    embeddings = [layer for layer in module.modules() if isinstance(layer, StoredEmbedding)]
    found: dict[int, Any] = {id(layer.storage): layer.storage for layer in embeddings}
    tables = {storage.weight.untyped_storage().data_ptr() for storage in found.values() if hasattr(storage, "weight")}
    for storage in (layer.storage for layer in linears):
        is_view = hasattr(storage, "weight") and storage.weight.untyped_storage().data_ptr() in tables
        if not on_gpu:
            found[id(storage)] = storage
        elif not is_view:  # what is a part of a plain table is multiplied where it is
            found[id(storage)] = on_a_gpu(storage)
    found |= {id(one): one for one in (*(layer.bias for layer in linears), *module.parameters()) if one is not None}
    return sum(one.nbytes for value in found.values() for one in tensors_of(value))


def rank_of(source: Path, directory: Path, share: Share = WHOLE) -> Any:
    """A rank's part of a model that is loaded from `source`."""
    register()
    config = AutoConfig.from_pretrained(directory)
    complete_plan(config, share)
    make = lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # noqa: E731
    return load_stored(make, source, torch.bfloat16, share)


def held(source: Path, directory: Path) -> int:
    """Bytes of the weights of a model that was loaded from `source`."""
    return held_bytes(rank_of(source, directory))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("plain"), FAMILIES["llama"])


@pytest.mark.parametrize("name", slow_but(FEW, CHECKPOINTS))
def test_a_quantized_checkpoint_takes_what_its_matrices_hold(name: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", name)
    assert stored_bytes(tmp_path / "model", "bfloat16") == held(tmp_path / "model", tmp_path / "model")
    assert count_weights(tmp_path / "model") == count_weights(plain)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", slow_but((*FEW, "compressed-tensors in activation order"), CHECKPOINTS))
def test_a_rank_of_a_quantized_checkpoint_takes_what_it_holds(
    name: str, tied: bool, on_gpu: bool, tmp_path: Path
) -> None:
    """Groups in activation order are padded where their inputs are divided."""
    config = tiny.llama(**SIZES, head_dim=32, tie_word_embeddings=tied)
    directory = tmp_path / "model"
    write(tiny.save(tmp_path / "plain", config), directory, name)
    ranks = [rank_of(directory, directory, Share(rank, 3)) for rank in range(3)]
    most = max(held_bytes(rank, on_gpu=on_gpu) for rank in ranks)
    assert rank_bytes(directory, "bfloat16", 3, on_gpu=on_gpu) == most
    whole = stored_bytes(directory, "bfloat16", on_gpu=on_gpu)
    assert whole == held_bytes(rank_of(directory, directory), on_gpu=on_gpu)
    assert whole < 3 * most


def test_the_rank_with_most_heads_is_counted_where_ranks_have_different_numbers_of_them(tmp_path: Path) -> None:
    config = tiny.llama(**(SIZES | {"num_key_value_heads": 2, "intermediate_size": 256}), head_dim=32)
    directory = tmp_path / "model"
    write(tiny.save(tmp_path / "plain", config), directory, "awq")
    taken = [held_bytes(rank_of(directory, directory, Share(rank, 4))) for rank in range(4)]
    assert taken[0] < taken[1]
    assert rank_bytes(directory, "bfloat16", 4) == max(taken)


def mixed(folder: Path, *, tied: bool) -> Path:
    """The directory of a model that is stored in `model.gguf` beside it, in several types."""
    config = tiny.llama(**SIZES, head_dim=32, tie_word_embeddings=tied)
    directory = tiny.save(folder / "model", config)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    stored_gguf.write(model, folder / "model.gguf", "llama", TYPES)
    write_stored_in(directory, folder / "model.gguf")
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_takes_what_its_matrices_hold(tied: bool, tmp_path: Path) -> None:
    directory = mixed(tmp_path, tied=tied)
    whole = stored_bytes(directory, "bfloat16")
    assert whole is not None
    assert whole == held(tmp_path / "model.gguf", directory)
    for on_gpu in (False, True):
        ranks = [rank_of(tmp_path / "model.gguf", directory, Share(rank, 3)) for rank in range(3)]
        most = max(held_bytes(rank, on_gpu=on_gpu) for rank in ranks)
        assert rank_bytes(directory, "bfloat16", 3, on_gpu=on_gpu) == most
    table = 0 if tied else tiny.VOCABULARY * 96 * 34 // 32
    assert stored_bytes(directory, "bfloat16", read_by_a_step=True) == whole - table


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_take_what_is_counted(tied: bool, tmp_path: Path) -> None:
    directory = mixed(tmp_path, tied=tied)
    native = load(directory, str(KEPT), dtype="bfloat16").native
    assert isinstance(native, NativeDecoder)
    assert native.packed.embedding is None
    packed = sum(part.nbytes for part in native.packed.memory)
    assert stored_bytes(directory, "bfloat16") == pytest.approx(packed, rel=0.02)


Q4_K_M = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K"}
"""The types of a file of that name beside Q4_K."""


def k_quants(folder: Path, default: str = "Q4_K") -> tuple[Path, int]:
    """The directory of a model that is stored as Q4_K_M, and the bytes of its tensors in the file.

    `default` takes the place of Q4_K.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tiny.llama(**sizes, head_dim=64, tie_word_embeddings=True)
    directory, _ = stored_gguf.convert(folder, "llama", config, Q4_K_M, default=default)
    return directory, sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(folder / "model.gguf").tensors)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_k_quants_take_a_twentieth_more_than_their_file(tmp_path: Path) -> None:
    """Queries and keys are one matrix; values, of another type, are one of their own, also in kept weights."""
    directory, file_bytes = k_quants(tmp_path)
    values = {"path": str(directory), "device": "cpu", "compile": "off", "quantization": "stored"}
    values |= {"dtype": "bfloat16", "compile_directory": str(tmp_path / "code")}
    native = check_kept(TargetSection.model_validate(values)).native
    assert isinstance(native, NativeDecoder)
    assert [matrix.outputs for matrix in native.packed.layers[0].qkv] == [384, 128, 0]
    packed = sum(part.nbytes for part in native.packed.memory)
    assert packed <= 1.05 * file_bytes
    assert stored_bytes(directory, "bfloat16") == pytest.approx(packed, rel=0.02)


@pytest.mark.parametrize("default", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_a_gpu_takes_more_for_k_quants(default: str, tmp_path: Path) -> None:
    directory, _ = k_quants(tmp_path, default)
    module = rank_of(tmp_path / "model.gguf", directory)
    found = stored_bytes(directory, "bfloat16", on_gpu=True)
    assert found == held_bytes(module, on_gpu=True) > (stored_bytes(directory, "bfloat16") or 0)


def test_costs_and_plans_for_gpus_count_what_k_quants_take_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = k_quants(tmp_path)
    on_cpu, on_gpu = (stored_bytes(directory, "bfloat16", on_gpu=where) for where in (False, True))
    assert on_cpu != on_gpu
    values = {"target.path": str(directory), "target.quantization": "stored", "target.dtype": "bfloat16"}
    configuration = load_configuration({}, values)
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        monkeypatch.setattr(costs, "choose_device", lambda *_, own=device: torch.device(own))
        assert configuration_cost(configuration).target_bytes == expected
    options = DistillOptions(kind="eagle3", plan=True, json=True)
    print_plan(options, directory, 1, "stored")
    assert json.loads(capsys.readouterr().out)["target"]["stored"] == on_gpu
    print_plan(options, directory, 2, "stored")
    each = rank_bytes(directory, "bfloat16", 2, on_gpu=True)
    assert each is not None
    assert on_gpu is not None
    assert json.loads(capsys.readouterr().out)["target"]["stored"] == 2 * each > on_gpu


def test_plain_weights_are_not_stored_ones(plain: Path) -> None:
    assert stored_bytes(plain, "bfloat16") is None


def test_every_plan_of_memory_counts_the_stored_bytes(plain: Path, tmp_path: Path) -> None:
    quantized.save(plain, tmp_path / "model", *CHECKPOINTS["awq"])
    size = stored_bytes(tmp_path / "model", "bfloat16")
    assert size is not None
    values = {"target.path": str(tmp_path / "model"), "target.quantization": "stored", "target.dtype": "bfloat16"}
    configuration = load_configuration({}, values | {"target.kv.pool_bytes": 1 << 20})

    def problems(memory: int) -> list[preflight.Problem]:
        machine = Resources(cpus=2, gpus=0, memory_bytes=memory)
        placement = plan(configuration, [machine])
        return list(preflight.memory_problems(configuration, placement, [machine], tmp_path / "model", None))

    assert not problems((1 << 20) + size)
    assert problems((1 << 20) + size - 1)
    assert configuration_cost(configuration).target_bytes == size
    assert weight_bytes(TargetSection.model_validate(configuration.target)) == size


def test_a_plan_of_memory_counts_what_each_rank_holds(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", "gptq in activation order")
    size, whole = rank_bytes(tmp_path / "model", "bfloat16", 3), stored_bytes(tmp_path / "model", "bfloat16")
    assert size is not None
    assert whole is not None
    assert 3 * size > whole
    values = {"target.path": str(tmp_path / "model"), "target.quantization": "stored", "target.dtype": "bfloat16"}
    values |= {"target.tensor_parallel": "3", "target.device": "cpu"}
    configuration = load_configuration({}, values | {"target.kv.pool_bytes": 1 << 20})
    for memory, fits in ((3 * ((1 << 20) + size), True), (3 * ((1 << 20) + size) - 1, False)):
        machine = Resources(cpus=8, gpus=0, memory_bytes=memory)
        placement = plan(configuration, [machine])
        found = preflight.memory_problems(configuration, placement, [machine], tmp_path / "model", None)
        assert bool(list(found)) is not fits


@pytest.mark.parametrize("config", [T5Config(), Mistral3Config()], ids=["encoder-decoder", "images"])
def test_a_plan_of_memory_leaves_what_is_no_decoder_to_the_start(
    config: PreTrainedConfig, plain: Path, tmp_path: Path
) -> None:
    """The start refuses it by its name."""
    directory = tmp_path / "model"
    write(plain, directory, "awq")
    values = json.loads((directory / "config.json").read_text())
    own = config.to_dict() | {"quantization_config": values["quantization_config"], "num_hidden_layers": 2}
    (directory / "config.json").write_text(json.dumps(own))
    assert rank_bytes(directory, "bfloat16", 2) is None


def test_ranks_that_do_not_divide_the_heads_are_one_problem(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "model", "awq")
    values = {"target.path": str(tmp_path / "model"), "target.quantization": "stored", "target.device": "cpu"}
    configuration = load_configuration({}, values | {"target.tensor_parallel": "4"})
    machine = Resources(cpus=8, gpus=0, memory_bytes=1 << 30)
    placement = plan(configuration, [machine])
    found = list(preflight.model_problems(configuration, placement, [machine], tmp_path / "model", None))
    assert [(problem.subject, problem.remedy) for problem in found] == [
        ("target.tensor_parallel", "set it to 1 or 3 or 6")
    ]


def test_what_stands_behind_a_long_vocabulary_is_found(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(1)
    writer.add_token_list([f"token {index}" for index in range(2000)])
    writer.add_token_types([1] * 2000)
    writer.add_head_count(3)
    writer.add_tensor("token_embd.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    assert file.matrix("model.embed_tokens.weight").dequantized().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("name", "apart"), [("bitsandbytes nf4", set()), ("gptq in activation order", {"o_proj", "down_proj"})]
)
def test_matrices_alike_are_read_once_for_all_layers(
    name: str, apart: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a rank's inputs in activation order, whose padding differs."""
    read: list[str] = []
    matrix = QuantizedCheckpoint.matrix

    def counted(self: QuantizedCheckpoint, parameter: str, *arguments: Any) -> Storage:
        read.append(parameter)
        return matrix(self, parameter, *arguments)

    monkeypatch.setattr(QuantizedCheckpoint, "matrix", counted)
    config = tiny.llama(**SIZES, head_dim=32)
    write(tiny.save(tmp_path / "plain", config), tmp_path / "model", name)
    rank_bytes(tmp_path / "model", "bfloat16", 3)
    assert {parameter.split(".")[-2] for parameter in read if ".layers.1." in parameter} == apart


def test_what_tells_kinds_of_matrices_apart_reads_no_scales(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 8-bit scales of a checkpoint are 1/32 of its bytes."""
    write(plain, tmp_path / "model", "bitsandbytes nf4 nested")
    checkpoint = QuantizedCheckpoint(tmp_path / "model")
    compared: list[torch.Tensor] = []

    def diff(values: torch.Tensor) -> torch.Tensor:
        compared.append(values)
        return values[1:] - values[:-1]

    monkeypatch.setattr(torch.Tensor, "diff", diff)
    assert checkpoint.kind_of("model.layers.0.mlp.down_proj.weight")
    assert not compared
