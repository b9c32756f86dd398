"""Compilation changes no token. A model that cannot be compiled runs uncompiled, unless compilation is required."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ModelLoadError
from cluster.core.tree import TokenTree
from tests.support.engines.packed_reference import PackedReference
from tests.support.models import tiny
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.triton import CAPABILITIES, TritonStep
from workers.forward.layer_lists import decoder_layers
from workers.forward.layout import RowShape
from workers.forward.loaded_model import LoadedModel
from workers.forward.runner import ForwardRow, ModelRunner, attention_setting
from workers.kv.pool import KvPool
from workers.model import loading
from workers.model.loading import load_model

pytestmark = pytest.mark.slow

TREE = TokenTree((7, 8, 9, 7), (-1, -1, 0, 1))


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of compiled code, for all tests of this file."""
    return tmp_path_factory.mktemp("code")


def logits(model: LoadedModel) -> torch.Tensor:
    """The logits of a prompt, of one token after it, and of a branching tree beside another prompt."""
    pool = KvPool(model.kv_spec, KvSection(block_size=4, pool_bytes=4 << 20))
    runner = ModelRunner(model, pool)
    runner.warm_up()
    assert pool.blocks_free == pool.blocks_total
    first, second = pool.new_table(), pool.new_table()
    found = []
    for rows in (
        [ForwardRow(first, (5, 6, 7, 8, 9), select=(4,))],
        [ForwardRow(first, (10,), select=(0,))],
        [
            ForwardRow(first, (11,), TREE, select=tuple(range(5))),
            ForwardRow(second, (12, 13, 14), select=(2,)),
        ],
    ):
        for row in rows:
            pool.reserve(row.table, row.end)
        found.append(runner.forward(rows).clone())
        for row in rows:
            runner.commit(row)
    return torch.cat(found)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_compiled_model_computes_the_same(family: str, code: Path, tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.FAMILIES[family]())
    plain, compiled = (
        logits(load_model(ModelSection(path=str(directory), device="cpu", compile=how, compile_directory=str(code))))
        for how in ("off", "on")
    )
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-4)
    assert torch.equal(compiled.argmax(dim=1), plain.argmax(dim=1))


@pytest.mark.parametrize("how", ["auto", "on"])
def test_a_model_that_cannot_be_compiled_runs_uncompiled_unless_compilation_is_required(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(module: PreTrainedModel, _: str | None) -> None:
        for layer in decoder_layers(module):
            layer.forward = refuse

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(loading, "compile_layers", broken)
    directory = tiny.save(tmp_path, tiny.llama())
    section = ModelSection.model_validate(
        {"path": str(directory), "device": "cpu", "compile": how, "dtype": "bfloat16"}
    )
    if how == "on":
        with pytest.raises(ModelLoadError, match="cannot be compiled: no such instruction"):
            load_model(section)
    else:
        assert logits(load_model(section)).isfinite().all()


def test_int8_weights_leave_most_greedy_tokens_unchanged(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama(), sharpness=1.0)
    whole, short = (
        logits(load_model(ModelSection(path=str(directory), device="cpu", quantization=how)))
        for how in ("none", "int8")
    )
    assert not torch.equal(whole, short)
    assert torch.nn.functional.cosine_similarity(whole, short, dim=1).min() > 0.999


class Noted(PackedReference):
    """Notes which kernels of attention the steps launch: those of prompt chunks or others, and words of a query."""

    launched: ClassVar[set[tuple[bool, int]]] = set()

    def plan(self, rows: Sequence[RowShape]) -> TritonStep:
        step = super().plan(rows)
        self.launched.update((one.is_wide, one.words.shape[1]) for parts in step.queries.values() for one in parts)
        return step


def test_the_warm_up_launches_the_kernels_of_prompt_chunks_alone_and_before_a_tree(tmp_path: Path) -> None:
    """Without CUDA graphs as well: a compiler would work for seconds while the first request waits."""
    directory = str(tiny.save(tmp_path, tiny.llama()))
    model = load_model(ModelSection(path=directory, device="cpu", native="off", compile="off"))
    pool = KvPool(model.kv_spec, KvSection(block_size=16), blocks=20)
    backend = Noted(attention_setting(model, pool))
    ModelRunner(model, pool, attention=ChosenBackend("noted", backend, CAPABILITIES)).warm_up()
    assert backend.launched == {(False, 1), (True, 0), (True, 1)}
    assert pool.blocks_free == pool.blocks_total
