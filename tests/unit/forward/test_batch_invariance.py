"""On CPU no sequence changes a bit of another one's logits: alone and beside any others they are the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.models import tiny
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model

pytestmark = pytest.mark.slow

TEXT = tuple((7 * index) % 90 + 3 for index in range(30))
TREE = TokenTree((7, 8, 9, 7, 11, 12), (-1, -1, 0, 2, 1, 3))
ROWS = ((TEXT[:1], EMPTY_TREE), (TEXT[:5], EMPTY_TREE), (TEXT[:23], EMPTY_TREE), (TEXT[:23], TREE))
NEIGHBOURS = ([TEXT[:1]], [TEXT[:3]] * 2, [TEXT[:1]] * 7, [TEXT] * 3)
LAYERS = {"gpt2": "n_layer"}
MEMORY = PoolSection(block_size=4)


@pytest.fixture(autouse=True, params=[1, 2], ids=lambda count: f"{count} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """How the kernels divide a step among threads depends on all of its rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("code"))


def load(directory: Path, config: PreTrainedConfig, code: str, **values: object) -> LoadedModel:
    path = str(tiny.save(directory, config))
    section = {"path": path, "device": "cpu", "compile": "off", "compile_directory": code, "dtype": "float32"}
    return load_model(ModelSection.model_validate(section | values))


def logits(
    model: LoadedModel, tokens: tuple[int, ...], tree: TokenTree, others: Sequence[tuple[int, ...]], memory: PoolSection
) -> torch.Tensor:
    pool = KvPool(model.kv_spec, memory, 256)
    rows = []
    for read, guess in ((tokens, tree), *((other, EMPTY_TREE) for other in others)):
        table, width = pool.new_table(), len(read) + len(guess)
        pool.reserve(table, width)
        rows.append(ForwardRow(table, read, guess, select=tuple(range(width))))
    return ModelRunner(model, pool).forward(rows)[: len(tokens) + len(tree)].clone()


def check(model: LoadedModel, memory: PoolSection = MEMORY) -> None:
    for tokens, tree in ROWS:
        alone = logits(model, tokens, tree, (), memory)
        for others in NEIGHBOURS:
            found = logits(model, tokens, tree, others, memory)
            assert torch.equal(found, alone), (len(tokens), len(tree), len(others))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_heads", [6, 3, 2])
def test_with_the_cpu_kernels(dtype: str, kv_heads: int, code: str, tmp_path: Path) -> None:
    model = load(tmp_path, tiny.llama(num_hidden_layers=2, num_key_value_heads=kv_heads), code, dtype=dtype)
    assert model.native is not None
    check(model)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_with_the_modules_of_transformers_in_float32(family: str, quantization: str, code: str, tmp_path: Path) -> None:
    config = tiny.FAMILIES[family](**{LAYERS.get(family, "num_hidden_layers"): 2})
    model = load(tmp_path, config, code, native="off", quantization=quantization)
    assert model.native is None
    check(model)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_with_a_mixture_of_experts_in_float32(quantization: str, code: str, tmp_path: Path) -> None:
    """A router that chose other experts beside other rows would change much more than a bit."""
    check(load(tmp_path, tiny.qwen3_moe(num_hidden_layers=2), code, quantization=quantization))


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_with_keys_and_values_in_8_bits(kv: str, native: str, code: str, tmp_path: Path) -> None:
    """Logits over keys and values in 8 bits have equal bits alone and beside others, with and without CPU kernels."""
    section = KvSection(dtype=kv, block_size=4)
    path = str(tiny.save(tmp_path, tiny.llama(num_hidden_layers=2)))
    model = load_model(
        TargetSection(path=path, device="cpu", native=native, compile="off", compile_directory=code, kv=section)
    )
    assert (model.native is not None) == (native == "auto")
    check(model, section)
