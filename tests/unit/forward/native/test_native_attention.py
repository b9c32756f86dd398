"""For all rows and layers, the CPU kernel computes the same as PyTorch's attention over gathered blocks.

A token's result depends on its own sequence alone. The rest of the batch, the chunks of its prompt and the number of
threads do not change a bit.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.tree import TokenTree
from tests.support.engines.attention_cases import Bench, Case, Row, cases, setting_of, spec_of, trees
from tests.support.engines.kept_kernels import NARROW, WIDE, portable
from tests.support.models import tiny
from workers.forward.backends.base import AttentionSetting, StepKind
from workers.forward.backends.native import CAPABILITIES, NativeBackend
from workers.forward.layout import RowShape
from workers.forward.native import build
from workers.forward.native.build import INSTRUCTION_SETS, processor_flags
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.kv.spec import LayerShape
from workers.model.loading import load_model

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""Relative error of rounding an exact result to the nearest number."""
WEIGHTS = 2.0**-6
"""Absolute error of weighted means of values below 8 where each weight is rounded to bfloat16 (2^-9 of it)."""

SMALLEST = INSTRUCTION_SETS[-1]
HAS_AVX2 = pytest.mark.skipif(not SMALLEST.needed <= processor_flags(), reason="needs a processor with AVX2")

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler on this machine"
)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_the_kernel_computes_what_pytorch_computes(dtype: torch.dtype, code: str, case: Case) -> None:
    check_case(case, dtype, code)


@settings(max_examples=10, deadline=None)
@given(case=cases(dims=(32, 64, 96)))
def test_tile_registers_compute_what_pytorch_computes(emulated: str, case: Case) -> None:
    """Emulated registers show that the code for AMX addresses the right numbers."""
    check_case(case, torch.bfloat16, emulated)


def check_case(case: Case, dtype: torch.dtype, code: str) -> None:
    """The kernel's results are those of PyTorch in single precision up to rounding, and it stores the same numbers."""
    ours, theirs = Bench(case, dtype, code), Bench(case, dtype, code, wide=True)
    library = build.load_library(code)
    assert library is not None
    on_tiles = dtype is torch.bfloat16 and library.pilotfish_has_tiles() and case.layers[0].head_dim % 32 == 0
    on_tiles &= case.section.dtype == "auto" and case.layers[0].latent_dim is None
    on_tiles &= case.layers[0].alibi_slopes is None
    for layer in range(len(case.layers)):
        found, expected = ours.attend(layer), theirs.attend(layer, natively=False)
        for one, other in zip(found, expected, strict=True):
            error = WEIGHTS if on_tiles else 1e-5
            torch.testing.assert_close(one.float(), other, rtol=ROUNDING[dtype], atol=error)
    for one, other in zip((*ours.pool.keys, *ours.pool.values), (*theirs.pool.keys, *theirs.pool.values), strict=True):
        assert torch.equal(one.to(other.dtype), other)  # stored in the same slots, and no other slot was written


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("heads", [128, 7])
def test_latents_of_the_width_of_deepseek_are_read_once_for_keys_and_values(heads: int, kv: str, code: str) -> None:
    """576 numbers of a key, of which 512 are its value."""
    shape = LayerShape(1, 576, None, heads, latent_dim=512)
    case = Case((shape,), KvSection(dtype=kv), (Row(70, 1, (-1, -1, 0, 2)), Row(0, 9), Row(33, 1)))
    for dtype in (torch.float32, torch.bfloat16):
        check_case(case, dtype, code)
    alone = torch.cat(Bench(case, torch.bfloat16, code).attend(0))
    torch.set_num_threads(3)
    assert torch.equal(torch.cat(Bench(case, torch.bfloat16, code).attend(0)), alone)


@pytest.mark.parametrize("width", [NARROW, WIDE, pytest.param(SMALLEST.compiler_flags, marks=HAS_AVX2)], ids=str)
def test_every_width_reads_and_stores_8_bits_alike(
    width: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable C of two widths, and the code for AVX2."""
    monkeypatch.setattr(build, "_FLAGS", portable(*width))
    rows = (Row(70, 1, (-1, -1, 0, 2)), Row(0, 45), Row(33, 1))
    for kv, dim, dtype in product(("int8", "fp8"), (64, 20), (torch.float32, torch.bfloat16)):
        section = KvSection(dtype=kv, block_size=4)
        check_case(Case((LayerShape(2, dim, None, 3),), section, rows), dtype, str(tmp_path))


def test_numbers_between_two_of_fp8_are_stored_as_pytorch_rounds_them(code: str) -> None:
    exact = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 to 448
    halfway = (exact[1:] + exact[:-1]) / 2
    near = [torch.nextafter(halfway, torch.full_like(halfway, bound)) for bound in (0.0, 448.0)]
    key = torch.stack([torch.cat((row, exact[-2:])) for row in (exact[:-1], halfway, *near)])[None, None]
    case = Case((LayerShape(1, 128),), KvSection(dtype="fp8", block_size=4), (Row(0, 4),))
    ours, theirs = Bench(case, torch.float32, code), Bench(case, torch.float32, code)
    for bench in (ours, theirs):
        bench.fresh = [[key, key, -key]]
        bench.attend(0, natively=bench is ours)
    assert torch.equal(ours.pool.keys[0], theirs.pool.keys[0])
    assert torch.equal(ours.pool.values[0], theirs.pool.values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=30, deadline=None)
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_the_batch_around_a_row_does_not_change_a_bit(dtype: torch.dtype, code: str, case: Case, order: Random) -> None:
    bench = Bench(case, dtype, code)
    shuffled = order.sample(range(len(case.rows)), len(case.rows))
    for layer in range(len(case.layers)):
        together = bench.attend(layer)
        for place, again in zip(shuffled, bench.attend(layer, shuffled), strict=True):
            assert torch.equal(together[place], again)
            assert torch.equal(together[place], bench.attend(layer, [place])[0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
def test_the_number_of_threads_does_not_change_a_bit(kv: str, dtype: torch.dtype, code: str) -> None:
    rows = (Row(200, 1, tuple(range(-1, 40))), Row(0, 300), Row(3, 1), Row(90, 2, (-1, -1, 0, 1, 1)))
    bench = Bench(Case((LayerShape(3, 64, None, 3),), KvSection(dtype=kv), rows), dtype, code)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(torch.cat(bench.attend(0)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_token_with_many_heads_per_kv_head_is_computed_by_several_threads(dtype: torch.dtype, code: str) -> None:
    """A single token cannot be divided further, however many heads share its keys."""
    bench = Bench(Case((LayerShape(1, 64, None, 32),), KvSection(), (Row(40, 1),)), dtype, code)
    found = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        found.append(bench.attend(0)[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("kv", "dtype", "dim"),
    [
        ("auto", torch.float32, 48),
        ("auto", torch.bfloat16, 64),
        ("int8", torch.float32, 64),
        ("int8", torch.bfloat16, 20),
        ("fp8", torch.float32, 64),
        ("fp8", torch.bfloat16, 20),
    ],
    ids=str,
)
@settings(max_examples=30, deadline=None)
@given(
    window=st.sampled_from([None, 7, 16, 33]),
    block_size=st.sampled_from([1, 3, 16]),
    cuts=st.sets(st.integers(1, 199)),
    committed=st.integers(0, 199),
)
def test_a_token_is_the_same_in_a_prompt_in_a_chunk_and_in_a_chain(
    window: int | None,
    block_size: int,
    cuts: set[int],
    committed: int,
    kv: str,
    dtype: torch.dtype,
    dim: int,
    code: str,
) -> None:
    section = KvSection(dtype=kv, block_size=block_size)
    bench = Bench(Case((LayerShape(2, dim, window, 3),), section, (Row(0, 200),)), dtype, code)
    (shape,), ((query, key, value),) = bench.shapes, bench.fresh
    (whole,) = bench.attend(0)

    def again(first: int, fresh: int, nodes: int = 0) -> torch.Tensor:
        bench.shapes = [RowShape(shape.blocks, first, fresh, TokenTree.chain(range(nodes)))]
        part = slice(first, first + fresh + nodes)
        bench.fresh = [[query[:, :, part], key[:, :, part], value[:, :, part]]]
        return bench.attend(0)[0]

    edges = [0, *sorted(cuts), 200]
    chunks = [again(first, end - first) for first, end in pairwise(edges)]
    assert torch.equal(torch.cat(chunks), whole)
    assert torch.equal(again(committed, 1, 199 - committed), whole[committed:])


@pytest.mark.parametrize(
    ("kv", "dtype", "dim"),
    [
        ("auto", torch.float32, 16),
        ("auto", torch.bfloat16, 32),
        ("int8", torch.float32, 32),
        ("int8", torch.bfloat16, 16),
        ("fp8", torch.float32, 16),
        ("fp8", torch.bfloat16, 32),
    ],
    ids=str,
)
@settings(max_examples=30, deadline=None)
@given(parents=trees().filter(len), stored=st.integers(0, 140), window=st.sampled_from([None, 7, 33]))
def test_a_node_of_a_tree_is_the_same_as_its_path_decoded_by_itself(
    parents: tuple[int, ...], stored: int, window: int | None, kv: str, dtype: torch.dtype, dim: int, code: str
) -> None:
    case = Case((LayerShape(2, dim, window, 3),), KvSection(dtype=kv, block_size=4), (Row(stored, 1, parents),))
    bench = Bench(case, dtype, code)
    (shape,), (fresh,) = bench.shapes, bench.fresh
    (found,) = bench.attend(0)
    path = [len(parents) - 1]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    chosen = [0, *(node + 1 for node in path)]
    bench.shapes = [RowShape(shape.blocks, stored, 1, TokenTree.chain(range(len(path))))]
    bench.fresh = [[tensor[:, :, chosen] for tensor in fresh]]
    assert torch.equal(bench.attend(0)[0], found[chosen])


@pytest.mark.parametrize("block_size", [5, 16])
def test_tile_registers_give_few_queries_the_bits_of_a_prompt(block_size: int, emulated: str) -> None:
    """Few queries read keys as they lie in the pool; a prompt's are packed."""
    section = KvSection(block_size=block_size)
    bench = Bench(Case((LayerShape(2, 64, None, 3),), section, (Row(0, 150),)), torch.bfloat16, emulated)
    (shape,), (fresh,) = bench.shapes, bench.fresh
    (whole,) = bench.attend(0)
    for stored, fresh_tokens, nodes in ((149, 1, 0), (130, 1, 7), (63, 1, 3), (100, 9, 0), (90, 1, 15)):
        part = slice(stored, stored + fresh_tokens + nodes)
        bench.shapes = [RowShape(shape.blocks, stored, fresh_tokens, TokenTree.chain(range(nodes)))]
        bench.fresh = [[tensor[:, :, part] for tensor in fresh]]
        assert torch.equal(bench.attend(0)[0], whole[part])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.bfloat16, 32)], ids=str)
def test_nan_affects_only_tokens_that_attend_to_it(dtype: torch.dtype, dim: int, code: str) -> None:
    case = Case((LayerShape(2, dim, None, 2),), KvSection(block_size=4), (Row(9, 1, (-1, -1, 0)), Row(6, 3)))
    clean, spoilt = Bench(case, dtype, code), Bench(case, dtype, code)
    for bad in (float("nan"), float("inf"), float("-inf")):
        _, key, value = spoilt.fresh[0]
        for tensor in (key, value):
            tensor[:, :, 2] = bad  # the tree's second node, to which no other token attends
        expected, found = clean.attend(0), spoilt.attend(0)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0][[0, 1, 3]], expected[0][[0, 1, 3]])
        blocks, place = spoilt.shapes[0].blocks[0], 11
        for store, tensor in ((spoilt.pool.keys[0], key), (spoilt.pool.values[0], value)):
            assert torch.equal(store[blocks[place // 4], place % 4], tensor[0, :, 2].nan_to_num())


def setting(layer: LayerShape, dtype: torch.dtype, code: str) -> AttentionSetting:
    return setting_of(KvPool(spec_of((layer,), dtype), KvSection(), 2), (layer,), dtype, code)


@pytest.mark.parametrize(
    ("layer", "dtype", "problem"),
    [
        (LayerShape(1, 512), torch.float32, "heads of 512 numbers"),
        (LayerShape(1, 8, None, 128), torch.float32, "128 query heads per KV head"),
        (LayerShape(1, 8), torch.float16, "keys and values of torch.float16"),
    ],
)
def test_shapes_that_the_kernel_does_not_support_are_left_to_pytorch(
    layer: LayerShape, dtype: torch.dtype, problem: str, code: str
) -> None:
    assert problem in (CAPABILITIES.problem(setting(layer, dtype, code), StepKind.RAGGED) or "")


def test_the_kernel_is_built_once_per_code_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suited = setting(LayerShape(1, 8), torch.float32, str(tmp_path))
    NativeBackend(suited)
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]
    build.own_library.cache_clear()  # as in a new process
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("built again"))
    NativeBackend(suited)


@pytest.mark.parametrize("trouble", ["no compiler", "a broken compiler"])
def test_without_a_compiler_the_logits_are_the_same(
    trouble: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny.save(tmp_path / "model", tiny.mistral())

    def logits(kept: str) -> torch.Tensor:
        model = load_model(ModelSection(path=str(directory), device="cpu", compile_directory=kept))
        pool = KvPool(model.kv_spec, KvSection(block_size=4, pool_bytes=4 << 20))
        runner = ModelRunner(model, pool)
        prompt, tree = pool.new_table(), TokenTree((7, 8, 9), (-1, -1, 0))
        found = []
        for row in (
            ForwardRow(prompt, tuple(range(3, 40)), select=(36,)),
            ForwardRow(prompt, (11,), tree, select=(0, 1, 2, 3)),
        ):
            pool.reserve(prompt, row.end)
            found.append(runner.forward([row]).clone())
            runner.commit(row)
        return torch.cat(found)

    expected = logits(code)
    assert not caplog.records
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        found_compiler = None if trouble == "no compiler" else "false"
        patched.setattr(build.shutil, "which", lambda _: found_compiler)
        found = logits(str(tmp_path / "empty"))
    assert "slower path" in caplog.text
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
