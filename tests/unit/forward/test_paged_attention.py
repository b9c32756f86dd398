"""The paged runner computes what `transformers` computes, for every family and every kind of row."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CTRLConfig, Gemma4Config, PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from cluster.core.tree import TokenTree
from tests.support.engines.engine_sequence import some_tokens
from tests.support.models import tiny
from tests.zoo.configs import tiny_config
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.block_table import BlockTable
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.model.sharding import check_divisible, divide
from workers.model.share import Share

TOLERANCE = 2e-4


@dataclass
class Bench:
    reference: PreTrainedModel
    runner: ModelRunner
    pool: KvPool

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """Logits after the last of `tokens`, computed without any cache."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0, -1]

    def store(self, tokens: list[int], chunk: int = 1000) -> BlockTable:
        table = self.pool.new_table()
        for first in range(0, len(tokens), chunk):
            self.run(ForwardRow(table, tuple(tokens[first : first + chunk])))
        return table

    def run(self, *rows: ForwardRow, accepted: tuple[int, ...] = ()) -> torch.Tensor:
        for row in rows:
            self.pool.reserve(row.table, row.end)
        logits = self.runner.forward(rows)
        for row in rows:
            self.runner.commit(row, accepted)
        return logits


@pytest.fixture(scope="module", params=sorted(tiny.FAMILIES))
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    directory = tiny.save(tmp_path_factory.mktemp(request.param), tiny.FAMILIES[request.param]())
    return open_bench(directory)


def open_bench(directory: Path) -> Bench:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4, pool_bytes=4 << 20))
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return Bench(reference, ModelRunner(model, pool), pool)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).abs().max() < TOLERANCE)


def test_a_whole_prompt_has_the_logits_of_transformers(bench: Bench) -> None:
    tokens = some_tokens(37)
    row = ForwardRow(bench.pool.new_table(), tuple(tokens), select=(0, 20, 36))
    logits = bench.run(row)
    assert close(logits[0], bench.expected(tokens[:1]))
    assert close(logits[1], bench.expected(tokens[:21]))
    assert close(logits[2], bench.expected(tokens))


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 33])
def test_a_prompt_in_chunks_has_the_logits_of_transformers(bench: Bench, chunk: int) -> None:
    tokens = some_tokens(41, seed=1)
    table = bench.store(tokens[:-1], chunk)
    logits = bench.run(ForwardRow(table, (tokens[-1],), select=(0,)))
    assert close(logits[0], bench.expected(tokens))


def test_a_chain_has_the_logits_of_transformers(bench: Bench) -> None:
    tokens = some_tokens(30, seed=2)
    table = bench.store(tokens[:20])
    row = ForwardRow(table, tuple(tokens[20:22]), TokenTree.chain(tokens[22:]), tuple(range(10)))
    logits = bench.run(row, accepted=(0, 1, 2))
    for index in range(10):
        assert close(logits[index], bench.expected(tokens[: 21 + index]))
    assert table.stored_len == 25


def test_a_tree_node_attends_to_its_ancestors_only(bench: Bench) -> None:
    tokens = some_tokens(50, seed=3)
    tree = TokenTree(tokens=(5, 6, 7, 8, 5, 9, 10), parents=(-1, -1, 0, 0, 1, 3, 5))
    table = bench.store(tokens)
    row = ForwardRow(table, (11,), tree, tuple(range(8)))
    logits = bench.run(row, accepted=(0, 3, 5))
    for node in range(len(tree)):
        assert close(logits[node + 1], bench.expected([*tokens, 11, *tree.path_tokens(node)]))


def test_an_accepted_path_is_compacted(bench: Bench) -> None:
    tokens = some_tokens(29, seed=4)
    tree = TokenTree(tokens=(5, 6, 7, 8, 9), parents=(-1, -1, 1, 1, 3))
    table = bench.store(tokens)
    bench.run(ForwardRow(table, (11,), tree), accepted=(1, 3, 4))
    history = [*tokens, 11, 6, 8, 9]
    assert table.stored_len == len(history)
    logits = bench.run(ForwardRow(table, (12, 13), select=(0, 1)))
    assert close(logits[0], bench.expected([*history, 12]))
    assert close(logits[1], bench.expected([*history, 12, 13]))


def test_rows_of_all_kinds_share_one_pass(bench: Bench) -> None:
    histories = [some_tokens(count, seed=count) for count in (1, 9, 40, 70, 3)]
    tables = [bench.store(history) for history in histories]
    rows = [
        ForwardRow(tables[0], (4,), select=(0,)),
        ForwardRow(tables[1], (5,), TokenTree((6, 7, 8), (-1, -1, 1)), (0, 1, 2, 3)),
        ForwardRow(tables[2], tuple(some_tokens(35, seed=9)), select=(34,)),
        ForwardRow(tables[3], (9,), TokenTree.chain((4, 5)), (0, 2)),
        ForwardRow(tables[4], (9, 8), select=()),
    ]
    logits = bench.run(*rows)
    expected = [
        [*histories[0], 4],
        [*histories[1], 5],
        [*histories[1], 5, 6],
        [*histories[1], 5, 7],
        [*histories[1], 5, 7, 8],
        [*histories[2], *some_tokens(35, seed=9)],
        [*histories[3], 9],
        [*histories[3], 9, 4, 5],
    ]
    assert len(logits) == len(expected)
    for row_logits, history in zip(logits, expected, strict=True):
        assert close(row_logits, bench.expected(history))


def test_forks_write_to_separate_blocks(bench: Bench) -> None:
    tokens = some_tokens(10, seed=5)
    parent = bench.store(tokens)
    child = bench.pool.open([*tokens, 30], parent=parent)
    assert child.stored_len == len(tokens)
    bench.run(ForwardRow(parent, (20,)), ForwardRow(child, (30,)))
    logits = bench.run(ForwardRow(parent, (21,), select=(0,)), ForwardRow(child, (31,), select=(0,)))
    assert close(logits[0], bench.expected([*tokens, 20, 21]))
    assert close(logits[1], bench.expected([*tokens, 30, 31]))


def test_released_blocks_can_be_used_by_another_sequence(bench: Bench) -> None:
    before = bench.pool.blocks_free
    for seed in range(3):
        tokens = some_tokens(60, seed=seed)
        table = bench.store(tokens[:-1])
        logits = bench.run(ForwardRow(table, (tokens[-1],), select=(0,)))
        assert close(logits[0], bench.expected(tokens))
        bench.pool.release(table)
    assert bench.pool.blocks_free == before


def test_a_number_of_ranks_that_does_not_divide_the_heads_is_refused_with_the_valid_numbers() -> None:
    refused = r"2 does not divide num_attention_heads = 6 with num_key_value_heads = 3; it must be one of 1, 3, 6"
    with pytest.raises(ConfigurationError, match=refused):
        check_divisible(tiny.llama(), 2)


def test_codegen_is_divided_where_ranks_divide_each_of_its_four_parts() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("codegen"))
    with pytest.raises(ConfigurationError, match=r"4 is refused: .*; num_attention_heads = 8 must be a multiple of 16"):
        divide(model, Share(0, 4), "none", torch.device("meta"))


def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'ctrl' has no tensor-parallel plan"):
        check_divisible(CTRLConfig(n_head=2), 2)
    with pytest.raises(ConfigurationError, match="'gemma4' reads the embedding of one token"):
        check_divisible(Gemma4Config(), 2)


def test_weights_that_are_not_safetensors_are_not_loaded(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not opened")
    with pytest.raises(ModelLoadError, match="cannot be loaded"):
        load_model(ModelSection(path=str(tmp_path), device="cpu"))


def test_a_context_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.llama())
    with pytest.raises(ConfigurationError, match="max_context_len: 1000 is refused; the model's limit is 256"):
        load_model(ModelSection(path=str(directory), device="cpu"), max_context_len=1000)
