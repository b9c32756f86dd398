"""A replayed step computes the same tokens and stores the same KV as a step without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.tree import TokenTree
from tests.support.engines.graph_replay import (
    BLOCK,
    BRANCHING,
    CONFIGURATIONS,
    SIZES,
    TOLERANCE,
    Bench,
    FakeRecorder,
    decode_with_trees,
    gathering,
    open_bench,
    open_engine,
    scenario,
    some_tokens,
)
from tests.support.engines.packed_reference import packing
from tests.support.fakes.host_waits import OnGpu
from tests.support.models import tiny
from tests.support.models.hybrids import KINDS, committed_parts, save_hybrid
from workers.forward.backends import choice
from workers.forward.backends.base import REFERENCE, AttentionSetting, all_backends
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.flex import CAPABILITIES, Flex, FlexBackend
from workers.forward.captured_passes import CapturedPasses
from workers.forward.cuda_graphs import CudaGraphRunner, PackedBuffers
from workers.forward.graph_sizes import GraphSize, gathered_graph_sizes, packed_graph_sizes
from workers.forward.loaded_model import PassOptions, PassOutput
from workers.forward.partial_pass import PartialPass
from workers.forward.runner import ForwardRow, ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.ranks import AnotherRankFailed

pytestmark = pytest.mark.slow

PACKED_SIZES = [one for one in packed_graph_sizes(32) if (one.rows, one.tokens) in {(1, 1), (4, 16), (4, 64)}]
WITHOUT_CUDA = not torch.cuda.is_available()


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), CONFIGURATIONS[request.param]())


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Flex:
    """The kernel as `torch` defines it, over the whole pool."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return flex_attention


def visiting(flex: Flex) -> Callable[[AttentionSetting], ChosenBackend]:
    """Attention over the pool's blocks by `flex`."""
    return lambda setting: ChosenBackend("flex", FlexBackend(setting, flex), CAPABILITIES)


@pytest.mark.parametrize("kind", ["gathered", "visited", "packed"])
def test_replayed_steps_compute_and_store_the_same_as_others(directory: Path, kind: str, unfused: Flex) -> None:
    tape = FakeRecorder()
    attention = {"gathered": gathering, "visited": visiting(unfused), "packed": packing}[kind]
    sizes = PACKED_SIZES if kind == "packed" else SIZES
    plain, replaying = open_bench(directory), open_bench(directory, tape, attention=attention, sizes=sizes)
    captured = tape.recorded
    (expected, tables), (actual, mirrored) = scenario(plain), scenario(replaying)
    assert tape.replayed == len(actual)  # every step had a graph
    assert tape.recorded == captured == len(sizes)
    for one, other in zip(expected, actual, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() < TOLERANCE
    for one_table, other_table in zip(tables, mirrored, strict=True):
        assert (plain.stored(one_table) - replaying.stored(other_table)).abs().max() < TOLERANCE
    assert plain.pool.blocks_free == replaying.pool.blocks_free


@pytest.mark.parametrize("kind", ["gathered", "packed"])
@pytest.mark.parametrize("family", KINDS)
def test_recurrent_layers_are_replayed(tmp_path: Path, family: str, kind: str) -> None:
    """The plan of recurrent layers has fixed addresses in a graph. Padding rows and tokens store no state."""
    path, tape = save_hybrid(tmp_path, family).directory, FakeRecorder()
    attention, sizes = (packing, PACKED_SIZES) if kind == "packed" else (gathering, SIZES)
    plain, replaying = open_bench(path), open_bench(path, tape, attention=attention, sizes=sizes)
    captured = tape.recorded
    (expected, tables), (actual, mirrored) = scenario(plain), scenario(replaying)
    assert tape.replayed == len(actual)  # every step had a graph
    assert tape.recorded == captured == len(sizes)
    for one, other in zip(expected, actual, strict=True):
        assert (one - other).abs().max() < TOLERANCE
    for table, mirror in zip(tables, mirrored, strict=True):
        states = zip(committed_parts(plain.pool, table), committed_parts(replaying.pool, mirror), strict=True)
        assert all((one - other).abs().max() < TOLERANCE for one, other in states)
    assert replaying.pool.states is not None
    assert not any(part[0].any() for parts in replaying.pool.states.slots.layers.values() for part in parts)


def prompts_beside_others(bench: Bench) -> list[torch.Tensor]:
    """The logits of two steps with a prompt of more than 64 tokens and other rows."""
    first, second, third = (bench.pool.new_table() for _ in range(3))
    return [
        bench.run(ForwardRow(first, some_tokens(66), select=(65,)), ForwardRow(second, some_tokens(7, seed=1))),
        bench.run(
            ForwardRow(second, (9,), TokenTree.chain((4, 5)), (0, 1, 2)),
            ForwardRow(first, (3,), select=(0,)),
            ForwardRow(third, some_tokens(100, seed=2), select=(99,)),
        ),
    ]


def test_prompts_beside_other_rows_replay_and_compute_the_same(directory: Path) -> None:
    tape = FakeRecorder()
    replaying = open_bench(directory, tape, attention=packing, sizes=[GraphSize(8, 192, 192, 32, 32)])
    expected, actual = prompts_beside_others(open_bench(directory)), prompts_beside_others(replaying)
    assert tape.replayed == 2
    for one, other in zip(expected, actual, strict=True):
        assert (one - other).abs().max() < TOLERANCE


def test_the_warm_up_captures_the_largest_size_first_and_serving_captures_none(tmp_path: Path) -> None:
    tape = FakeRecorder()
    sizes = gathered_graph_sizes(BLOCK, 64)
    bench = open_bench(tiny.save(tmp_path, tiny.llama()), tape, sizes=sizes)
    free = bench.pool.blocks_free
    assert tape.recorded == len(sizes)
    assert bench.graphs is not None
    assert [size for size, _ in bench.graphs.passes.captured] == sizes[::-1]
    tables = [bench.pool.new_table() for _ in range(3)]
    bench.run(*(ForwardRow(table, some_tokens(9)) for table in tables))  # no such step was captured
    assert (tape.recorded, tape.replayed) == (len(sizes), 0)
    bench.run(*(ForwardRow(table, (5,), select=(0,)) for table in tables))
    assert (tape.recorded, tape.replayed) == (len(sizes), 1)
    for table in tables:
        bench.pool.release(table)
    assert bench.pool.blocks_free == free


def test_a_step_larger_than_all_graphs_runs_without_one(tmp_path: Path) -> None:
    tape = FakeRecorder()
    bench = open_bench(tiny.save(tmp_path, tiny.llama()), tape)
    logits = bench.run(ForwardRow(bench.pool.new_table(), some_tokens(65), select=(64,)))
    assert logits.shape == (1, tiny.VOCABULARY)
    assert tape.replayed == 0


def test_the_part_of_the_model_that_drafts_is_captured_too(tmp_path: Path) -> None:
    tape, part = FakeRecorder(), PartialPass(layers=1)
    sizes = [GraphSize(1, 1, 1, 8, 1), GraphSize(1, 64, 64, 8, 64), GraphSize(8, 192, 192, 8, 32)]
    bench = open_bench(tiny.save(tmp_path, tiny.llama()), tape, attention=packing, sizes=sizes)
    assert bench.graphs is not None
    bench.runner.expect(part)
    bench.runner.warm_up()
    assert {size for size, one in bench.graphs.passes.captured if one is part} == set(sizes[:2])
    table = bench.pool.new_table()
    bench.pool.reserve(table, 3)
    replayed = tape.replayed
    bench.runner.forward([ForwardRow(table, (5, 6, 7), select=(2,))], PassOptions(part))
    assert tape.replayed == replayed + 1


def test_a_model_that_cannot_be_recorded_runs_without_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(function: Callable[[], None]) -> Callable[[], None]:
        asked.append(function)
        raise RuntimeError("called a synchronizing CUDA operation")

    directory = tiny.save(tmp_path, tiny.llama())
    plain, bench = open_bench(directory), open_bench(directory, refuse)
    (expected, _), (actual, _) = scenario(plain), scenario(bench)
    assert all((one - other).abs().max() < TOLERANCE for one, other in zip(expected, actual, strict=True))
    assert len(asked) == 1
    assert "no further passes are captured" in caplog.text


@pytest.mark.parametrize(("agreed", "attempts"), [(0, 1), (1, len(SIZES))])
def test_a_capture_that_another_rank_cannot_make_is_made_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agreed: int, attempts: int
) -> None:
    monkeypatch.setattr("workers.forward.captured_passes.least_of_all_ranks", lambda own, _: min(own, agreed))
    tape = FakeRecorder()
    bench = open_bench(tiny.save(tmp_path, tiny.llama()), tape)
    for width in (1, 2, 1, 2):
        bench.run(ForwardRow(bench.pool.new_table(), some_tokens(width), select=(0,)))
    assert (tape.recorded, tape.replayed) == (attempts, 0)


LARGE = 64
"""Tokens of a step that does not fit into memory below."""


def run_out(monkeypatch: pytest.MonkeyPatch, place: str, computed: list[int]) -> FakeRecorder:
    """Let large steps run out of memory in one place: their `buffers`, the first `pass`, its `outputs`, the `capture`.

    `computed` gets the tokens of each pass.
    """
    make, run, outputs = PackedBuffers.__init__, CudaGraphRunner._pass, CapturedPasses._output_buffers

    def check(at: str, tokens: int) -> None:
        if place == at and tokens >= LARGE:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def making(self: PackedBuffers, size: GraphSize, *others: Any) -> None:
        check("buffers", size.tokens)
        make(self, size, *others)

    def running(self: CudaGraphRunner, buffers: PackedBuffers, *others: Any) -> PassOutput:
        computed.append(buffers.size.tokens)
        check("pass", buffers.size.tokens)
        return run(self, buffers, *others)

    def giving(self: CapturedPasses[Any, Any, Any], examples: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        check("outputs", computed[-1])
        return outputs(self, examples)

    monkeypatch.setattr(PackedBuffers, "__init__", making)
    monkeypatch.setattr(CudaGraphRunner, "_pass", running)
    monkeypatch.setattr(CapturedPasses, "_output_buffers", giving)

    class Recorder(FakeRecorder):
        def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
            check("capture", computed[-1])
            return super().__call__(function)

    return Recorder()


@pytest.mark.parametrize("place", ["buffers", "pass", "outputs", "capture"])
def test_sizes_for_which_memory_runs_out_run_without_a_graph_and_smaller_ones_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    tape = run_out(monkeypatch, place, [])
    bench = open_bench(tiny.save(tmp_path, tiny.llama()), tape, attention=packing, sizes=PACKED_SIZES)
    assert bench.graphs is not None
    assert {size for size, _ in bench.graphs.passes.captured} == {size for size in PACKED_SIZES if size.tokens < LARGE}
    assert "out of memory" in caplog.text
    assert bench.graphs.passes.outputs
    assert len(bench.graphs.passes.outputs[0]) == 16  # as many as the largest graph has
    table = bench.pool.new_table()
    bench.run(ForwardRow(table, some_tokens(64), select=(63,)))
    assert tape.replayed == 0
    bench.run(ForwardRow(table, (5,), select=(0,)))
    assert tape.replayed == 1


@pytest.mark.parametrize("failing", ["buffers", "capture"])
def test_ranks_capture_smaller_sizes_after_memory_ran_out_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The other rank's part: it finds that the first has failed, at the end of what they do together."""
    calls: list[str] = []
    computed: list[int] = []

    def together(function: Callable[[], object], _: int) -> object:
        calls.append("capture" if calls and calls[-1] == "buffers" else "buffers")
        result = function()
        if calls[-1] == failing and computed[-1] >= LARGE:
            calls.append("failed")
            raise AnotherRankFailed("another rank cannot compute it")
        return result

    monkeypatch.setattr("workers.forward.captured_passes.try_together", together)
    tape = run_out(monkeypatch, "nowhere", computed)
    bench = open_bench(tiny.save(tmp_path, tiny.llama()), tape, attention=packing, sizes=PACKED_SIZES)
    assert bench.graphs is not None
    assert "failed" in calls
    assert {size for size, _ in bench.graphs.passes.captured} == {size for size in PACKED_SIZES if size.tokens < LARGE}


def test_a_size_whose_kernel_cannot_be_built_runs_without_a_frame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unbuilt(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no kernel fits")

    directory = tiny.save(tmp_path, tiny.llama())
    plain, bench = (
        open_bench(directory),
        open_bench(directory, FakeRecorder(), attention=visiting(unbuilt)),
    )
    (expected, _), (actual, _) = scenario(plain), scenario(bench)
    assert all((one - other).abs().max() < TOLERANCE for one, other in zip(expected, actual, strict=True))
    assert "no kernel fits" in caplog.text


@pytest.mark.parametrize("uses_cuda_graphs", [False, True])
def test_a_pass_does_not_synchronize_with_the_device(
    directory: Path, monkeypatch: pytest.MonkeyPatch, uses_cuda_graphs: bool
) -> None:
    monkeypatch.setattr(choice, "all_backends", lambda: [one for one in all_backends() if one.name == REFERENCE])
    bench = open_bench(directory, FakeRecorder() if uses_cuda_graphs else None)
    first, second = bench.pool.new_table(), bench.pool.new_table()
    bench.run(ForwardRow(first, some_tokens(19)), ForwardRow(second, some_tokens(50, seed=1)))
    rows = [ForwardRow(first, (4, 5), BRANCHING, tuple(range(1, 8))), ForwardRow(second, (6,), select=(0,))]
    for row in rows:
        bench.pool.reserve(row.table, row.end)
    bench.runner.forward(rows)  # creates the cached tensors
    with OnGpu() as gpu:
        bench.runner.forward(rows)
    assert gpu.waits == []


@pytest.mark.parametrize("kind", ["gathered", "packed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_equal_those_of_a_target_without_graphs(directory: Path, temperature: float, kind: str) -> None:
    """Three sequences. The draft trees contain tokens of the other target's answer and wrong tokens."""
    tape, plain = FakeRecorder(), open_engine(directory, None)
    if kind == "packed":
        replaying = open_engine(directory, tape, attention=packing, sizes=PACKED_SIZES)
    else:
        replaying = open_engine(directory, tape)
    answers = {f"s{seed}": decode_with_trees(plain, f"s{seed}", seed, temperature, ()) for seed in range(3)}
    for seed in range(3):
        answer = answers[f"s{seed}"]
        assert decode_with_trees(replaying, f"s{seed}", seed, temperature, answer) == answer
    assert tape.replayed >= 3 * 6
    assert plain.release_all() == replaying.release_all()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_of_a_hybrid_equal_those_of_a_target_without_graphs(tmp_path: Path, temperature: float) -> None:
    """States after rejected drafts are left behind, in graphs as outside of them."""
    path, tape = save_hybrid(tmp_path, "qwen3_next").directory, FakeRecorder()
    plain = open_engine(path, None)
    replaying = open_engine(path, tape, attention=packing, sizes=PACKED_SIZES)
    answer = decode_with_trees(plain, "s", 0, temperature, ())
    steps = tape.replayed
    assert decode_with_trees(replaying, "s", 0, temperature, answer) == answer
    assert 6 <= tape.replayed - steps < len(answer)  # drafts were accepted
    assert plain.release_all() == replaying.release_all()


# --- on a GPU ---------------------------------------------------------------------------------


def open_on_gpu(directory: Path, compiled: str, block_size: int = BLOCK, dtype: str = "float32") -> Bench:
    """An engine on the GPU. With `off` it uses no graphs."""
    model = load_model(ModelSection(path=str(directory), device="cuda", compile=compiled, dtype=dtype))
    pool = KvPool(model.kv_spec, KvSection(block_size=block_size), blocks=100)
    bench = Bench(pool, ModelRunner(model, pool))
    bench.runner.warm_up()
    return bench


@pytest.mark.cuda
@pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("compiled", "block_size", "dim"), [("off", BLOCK, 8), ("on", BLOCK, 8), ("on", 16, 64)])
def test_recorded_passes_on_a_gpu_compute_the_same_as_others(
    tmp_path: Path, compiled: str, block_size: int, dim: int
) -> None:
    """The last case packs rows."""
    directory = tiny.save(tmp_path, tiny.llama(head_dim=dim))
    expected, _ = scenario(open_bench(directory))
    bench = open_on_gpu(directory, compiled, block_size)
    for _ in range(2):
        actual, tables = scenario(bench)
        for one, other in zip(expected, actual, strict=True):
            assert (one - other.cpu()).abs().max() < 20 * TOLERANCE
        for table in tables:
            bench.pool.release(table)
    assert bench.pool.blocks_free == 100


@pytest.mark.cuda
@pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", KINDS)
def test_recorded_hybrids_on_a_gpu_compute_the_same_as_others(tmp_path: Path, family: str) -> None:
    directory = save_hybrid(tmp_path, family).directory
    expected, own = scenario(open_bench(directory))
    bench = open_on_gpu(directory, "on", block_size=16)
    assert bench.runner.graphs is not None
    assert bench.runner.graphs.passes.captured
    actual, tables = scenario(bench)
    for one, other in zip(expected, actual, strict=True):
        assert (one - other.cpu()).abs().max() < 20 * TOLERANCE
    assert [table.stored_len for table in own] == [table.stored_len for table in tables]


@pytest.mark.cuda
@pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")
def test_prompts_on_a_gpu_replay_and_compute_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.save(tmp_path, tiny.llama(head_dim=64))
    bench = open_on_gpu(directory, "on", block_size=16)
    assert bench.runner.graphs is not None
    run, results = bench.runner.graphs.run, list[object]()

    def kept(*step: object) -> object:
        results.append(run(*step))
        return results[-1]

    monkeypatch.setattr(bench.runner.graphs, "run", kept)
    expected, actual = prompts_beside_others(open_bench(directory)), prompts_beside_others(bench)
    assert len(results) == 2
    assert None not in results
    for one, other in zip(expected, actual, strict=True):
        assert (one - other.cpu()).abs().max() < 20 * TOLERANCE


@pytest.mark.cuda
@pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_pass_on_a_gpu_does_not_synchronize(directory: Path, compiled: str) -> None:
    bench = open_on_gpu(directory, compiled)
    table = bench.pool.new_table()
    bench.run(ForwardRow(table, some_tokens(19)))
    row = ForwardRow(table, (4, 5), BRANCHING, tuple(range(1, 8)))
    bench.pool.reserve(table, row.end)
    bench.runner.forward([row])
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.runner.forward([row])
    finally:
        torch.cuda.set_sync_debug_mode("default")


ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(WITHOUT_CUDA, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", "float32", TOLERANCE),
        pytest.param("cuda", "float32", 20 * TOLERANCE, marks=ON_GPU),
        pytest.param("cuda", "bfloat16", 2**-5, marks=ON_GPU),
    ],
)
def test_a_row_has_close_logits_and_the_same_tokens_in_graphs_of_several_sizes(
    tmp_path: Path, record_property: Callable[[str, object], None], device: str, dtype: str, bound: float
) -> None:
    """`bound` is a share of the largest logit. Products choose their code by the number of tokens, so bits may differ.

    Tokens may differ only where the two best logits are closer than both errors.
    """
    directory = tiny.save(tmp_path, tiny.llama(head_dim=64))
    few = [one for one in packed_graph_sizes(32) if (one.rows, one.tokens) in {(1, 4), (2, 8), (16, 64), (64, 256)}]
    bench = (
        open_bench(directory, FakeRecorder(), attention=packing, sizes=few)
        if device == "cpu"
        else open_on_gpu(directory, "on", 16, dtype)
    )
    graphs, tables = bench.runner.graphs, [bench.pool.new_table() for _ in range(48)]
    assert graphs is not None
    bench.run(ForwardRow(tables[0], some_tokens(19)))
    rows = [ForwardRow(tables[0], (7,), TokenTree.chain((5, 6, 9)), (0, 1, 2, 3))]
    rows += [ForwardRow(table, some_tokens(2, seed), select=(1,)) for seed, table in enumerate(tables[1:])]
    for row in rows:
        bench.pool.reserve(row.table, row.end)
    sizes, found = list[object](), list[torch.Tensor]()
    for count in (1, 2, 12, 48):
        step = rows[:count]
        sizes.append(graphs.size([row.shape for row in step], sum(len(row.select) for row in step)))
        found.append(bench.runner.forward(step)[:4].float().cpu().clone())
    assert None not in sizes
    assert len(set(sizes)) == len(sizes)
    alone = found[0]
    most, best = bound * float(alone.abs().max()), alone.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * most
    assert is_clear.any()
    for size, beside in zip(sizes, found, strict=True):
        difference = float((beside - alone).abs().max())
        record_property(str(size), difference)
        assert difference <= most
        assert torch.equal(beside.argmax(dim=1)[is_clear], alone.argmax(dim=1)[is_clear])
