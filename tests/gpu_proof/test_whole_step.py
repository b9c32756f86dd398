"""A whole step of a real configuration on a fake device: planned, computed and counted without weights or a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from cluster.core.config.target_section import KvSection
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE
from deploy.simulation.commands import simulate
from deploy.simulation.device import fake_device as counted
from deploy.simulation.device import prediction, step
from deploy.simulation.device.attention import NARROW
from deploy.simulation.device.decisions import ALL_GATHER
from deploy.simulation.device.fake_device import DEVICE, Kernel, KernelCounter, Operation, fake_device
from deploy.simulation.device.kernels import ALL_REDUCE, WAIT
from deploy.simulation.device.models import MODELS, RankModel, load
from deploy.simulation.device.prediction import added_chunk, chunked_prompt, predict
from deploy.simulation.device.speeds import OTHERS
from deploy.simulation.device.step import Rows, StepCount, count_step
from tests.gpu_proof.fake_training import MemoryCounter
from workers.forward import fused_layers, linear
from workers.forward.backends.base import AttentionSetting
from workers.forward.backends.triton import TritonBackend
from workers.forward.cuda_graphs import PackedBuffers
from workers.forward.gpu_product import GpuProduct
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.pool import KvPool
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore

pytestmark = pytest.mark.slow

SMALL = RankModel("Llama-3.1-8B")
LARGE = RankModel("Llama-3.3-70B", ranks=8)
PACKED = RankModel("Llama-3.1-8B", group=128)
LAYERS = 32


def shorten(monkeypatch: pytest.MonkeyPatch, name: str, layers: int) -> int:
    """Give a model that many layers."""
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = layers
    if hasattr(config, "layer_types"):
        config.layer_types = config.layer_types[:layers]
    monkeypatch.setitem(MODELS, name, config)
    return layers


def test_what_would_wait_for_the_device_raises() -> None:
    with fake_device() as device:
        number = torch.ones(1, device=device)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            number.item()
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(number > 0)


def test_an_operation_on_two_devices_raises() -> None:
    with fake_device() as device:
        assert device.type == DEVICE
        with pytest.raises(RuntimeError, match="device"):
            torch.ones(2, device=device) + torch.ones(2)


def test_a_cuda_graphs_plan_is_copied_in_one_piece_and_computes_almost_nothing() -> None:
    placements = (LayerPlacement(0, 0, AttentionWindow()), LayerPlacement(0, 0, AttentionWindow(100, sinks=4)))
    groups = KvCacheGroups(KvLayout(16), placements, (LayerShape(8, 128, heads_per_kv=4),))
    rows = [RowShape([range(9 * one, 9 * one + 9)], 100, 8, EMPTY_TREE) for one in range(30)]
    rows.append(RowShape([range(300, 320)], 0, 200, EMPTY_TREE))
    size = GraphSize(64, 512, 512, 2048, 256)
    with fake_device() as device, KernelCounter() as counter:
        setting = AttentionSetting(KvStore(groups, [], []), groups.block_layers * 2, 999, torch.bfloat16, device)
        planning = TritonBackend.__new__(TritonBackend)  # to plan needs neither the pool nor the package triton
        planning._bind(setting)
        buffers = PackedBuffers(size, planning, device)
        counter.operations.clear()
        buffers.fill(rows, range(440), range(440), range(31))
        assert (counter.copies, counter.operations) == (1, [])
        plan = buffers.metadata()
    assert len(counter.operations) <= 2  # the numbers of a row's blocks
    for narrow, wide in plan.queries.values():
        assert narrow.items.shape == ((256 + 7 * 64) // 8, 3)
        assert wide.items.shape == ((512 + 15 * (512 // 65)) // 16, 3)
        assert (narrow.words.shape, wide.words.shape) == ((256, 1), (512, 0))
    assert [narrow.splits for narrow, _ in plan.queries.values()] == [64, 4]


@pytest.mark.parametrize(("rows", "launches", "is_captured"), [
    ((Rows(1, 2048),), 6, True), ((Rows(8, 2048),), 8, True), ((Rows(4, 300, nodes=7),), 9, True),
    ((Rows(64, 300),), 9, True), ((Rows(1, 0, fresh=300),), 10, True), ((Rows(1, 0, fresh=2048),), 9, False),
    ((Rows(3, 700), Rows(1, 64, fresh=400), Rows(2, 90, nodes=3)), 10, True),
    ((Rows(32, 700), Rows(1, 64, fresh=1024)), 10, False),
    ((Rows(3, 100_000, nodes=7), Rows(1, 90, nodes=7)), 9, True), ((Rows(16, 40_000),), 8, False),
], ids=["decode", "batch", "verify", "large batch", "prompt", "long prompt", "mixed", "large mixed", "long rows",
        "many long rows"])  # fmt: skip
def test_a_step_runs_whole(rows: tuple[Rows, ...], launches: int, is_captured: bool) -> None:
    """A layer launches four products, a rotation and attention, one or two kernels; for more rows than four two norms,
    for more than sixteen a gate.

    Where the step fits a CUDA graph, the host launches nothing but that: it copies the step to the device, once.
    """
    step = count_step(SMALL, rows)
    assert step.layer_kernels == launches
    assert len(step.kernels) > LAYERS
    tokens = sum(kind.count * (kind.fresh + kind.nodes) for kind in rows)
    assert step.flops >= 2 * (step.weight_bytes // 2 - 128256 * 4096) * tokens
    assert (step.is_captured, step.beside) == (is_captured, 0)
    assert step.copies == (1 if is_captured else 4)
    assert 0.8 < step.share <= 1


@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("top_p", [False, True])
def test_a_decoding_step_reads_little_more_than_weights_and_keys_and_values(count: int, top_p: bool) -> None:
    step = count_step(SMALL, (Rows(count, 2048, top_p=top_p),))
    assert step.weight_bytes == pytest.approx(15.0e9, rel=0.01)
    assert step.bytes <= 1.05 * step.needed_bytes
    found = predict(step)
    assert found.floor_seconds < found.seconds


def test_verification_of_eight_tokens_reads_their_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What eight tokens of 64 rows take beyond what is needed is the sums of splits, and what grows with tokens.

    The latter is the same for each token in steps of one token a row.
    """
    layers = shorten(monkeypatch, SMALL.name, 2)
    decode, verify = (count_step(SMALL, (Rows(64, 2048, nodes=nodes),)) for nodes in (0, 7))
    keys, token, heads, splits = 64 * 2056, 2 * 8 * 128 * 2, 32, 5
    attention = sum(kernel.bytes for kernel in verify.kernels if kernel.name == NARROW)
    queries, parts = 2 * heads * 128 * 2, 2 * splits * heads * (128 + 2) * 4
    assert attention == layers * (keys * token + 512 * (queries + parts))

    def others(step: StepCount, tokens: int) -> float:
        launched = sum(kernel.bytes for kernel in step.sequence if kernel.name != NARROW)
        return (launched - step.weight_bytes) / tokens

    assert others(verify, 512) == pytest.approx(others(decode, 64), rel=0.1)
    growing = 512 * (layers * (queries + parts - token) + others(verify, 512))
    decided = sum(kernel.bytes for kernel in (*verify.decisions, *verify.moves))
    assert verify.bytes - verify.needed_bytes == growing + decided


@pytest.mark.parametrize(("name", "experts", "each", "expert_bytes"), [
    ("Qwen3-30B-A3B", 128, 8, 3 * 768 * 2048 * 2), ("gpt-oss-20b", 32, 4, 3 * 2880 * 2880 * 17 / 32),
])  # fmt: skip
def test_a_mixture_runs_whole_and_reads_the_experts_that_are_chosen(
    monkeypatch: pytest.MonkeyPatch, name: str, experts: int, each: int, expert_bytes: float
) -> None:
    """A layer launches two products, a rotation, attention, and six kernels for the mixture; for many rows a norm."""
    layers = shorten(monkeypatch, name, 4)
    one, many = (count_step(RankModel(name), rows) for rows in ((Rows(1, 2048),), (Rows(8, 300, nodes=7),)))
    assert one.is_fused
    assert (one.layer_kernels, many.layer_kernels) == (10, 11)
    chosen = experts * (1 - (1 - each / experts) ** 64)
    assert many.weight_bytes - one.weight_bytes == pytest.approx(layers * (chosen - each) * expert_bytes, rel=1e-6)
    assert one.bytes <= 1.05 * (one.weight_bytes + one.kv_bytes)


def test_a_rank_of_a_model_with_latent_attention_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank computes all heads of the attention, which is not reduced; experts and wide layers are shared."""
    shorten(monkeypatch, "DeepSeek-V3", 6)
    step = count_step(RankModel("DeepSeek-V3", ranks=8), (Rows(8, 300),))
    assert not step.is_fused
    assert len(step.all_reduces) == 3 + 2 * 3  # three layers have no experts


def test_recurrent_layers_launch_as_much_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of four layers keep a state, which is read once a row, and stored after its tokens and after each node."""
    shorten(monkeypatch, "Qwen3-Next-80B-A3B", 4)
    model = RankModel("Qwen3-Next-80B-A3B")
    one, two, verified, prompt = (
        count_step(model, rows)
        for rows in ((Rows(1, 300),), (Rows(2, 300),), (Rows(1, 300, nodes=3),), (Rows(1, 0, fresh=300),))
    )
    state = 32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 4 * 2
    assert (one.state_bytes, two.state_bytes, prompt.state_bytes) == (2 * 3 * state, 4 * 3 * state, 3 * state)
    token = 2 * 2 * 256 * 2
    assert (one.kv_bytes, prompt.kv_bytes) == (302 * token, 600 * token)
    assert one.launches == two.launches == verified.launches
    assert prompt.launches == one.launches + 1  # the layer that attends has a kernel of its own for wide rows
    scans, longer = (
        [kernel for kernel in step.kernels if kernel.name == "advance_delta_row"] for step in (verified, prompt)
    )
    assert [kernel.steps for kernel in (*scans, *longer)] == [4] * 3 + [300] * 3
    assert scans[0].bytes > 5 * 32 * 128 * 128 * 4
    assert all(step.is_captured for step in (one, two, verified, prompt))
    assert all(step.beside == 0 for step in (one, two, verified, prompt))
    found = predict(prompt)
    assert found.seconds > 3 * 300 * OTHERS.step_seconds


def test_keys_and_values_are_counted_in_their_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, "Llama-3.1-8B", 2)
    plain, packed = (
        count_step(RankModel("Llama-3.1-8B", kv_dtype=kind), (Rows(8, 2048),)) for kind in ("auto", "int8")
    )
    tokens = 8 * (2049 + 1) * 2 * 2
    assert (plain.kv_bytes, packed.kv_bytes) == (tokens * 8 * 128 * 2, tokens * 8 * (128 + 4))
    assert plain.bytes - packed.bytes == plain.kv_bytes - packed.kv_bytes
    assert plain.launches == packed.launches


@pytest.mark.parametrize(("nodes", "tiles"), [(3, 1), (7, 1), (8, 2)])
def test_each_tile_of_eight_queries_reads_the_keys_of_its_row(
    monkeypatch: pytest.MonkeyPatch, nodes: int, tiles: int
) -> None:
    layers = shorten(monkeypatch, SMALL.name, 2)
    step = count_step(SMALL, (Rows(4, 300, nodes=nodes),))
    attention = [kernel for kernel in step.kernels if kernel.name == NARROW]
    assert len(attention) == layers
    keys, token, query = 4 * (301 + nodes), 2 * 8 * 128 * 2, 2 * 32 * 128 * 2
    assert attention[0].bytes == keys * token * tiles + 4 * (1 + nodes) * query
    assert step.kv_bytes == layers * (keys + 4 * (1 + nodes)) * token


def test_bounds_of_predicted_steps_of_llama_8b() -> None:
    """A step of one or eight rows is to take 1.25 of its floor, too, but waits for memory: see BENCHMARKS."""
    decode = predict(count_step(SMALL, (Rows(64, 2048, top_p=True),)))
    assert decode.seconds <= 1.5 * decode.floor_seconds
    verify = predict(count_step(SMALL, (Rows(64, 2048, nodes=7, top_p=True),)))
    assert verify.sampling_seconds <= 0.1 * verify.seconds


def test_a_prompt_chunk_adds_what_its_operations_cost() -> None:
    found = added_chunk(SMALL)
    assert found.seconds <= 1.05 * found.computed_seconds


@pytest.mark.parametrize(("count", "bound"), [(1, 1.05), (8, 1.05), (64, 1.10)])
def test_a_rank_of_eight_reduces_twice_a_layer_and_gathers_once_for_the_decisions(count: int, bound: float) -> None:
    """Each rank has an eighth of the weights, keys and values, and all of the residual stream."""
    step = count_step(LARGE, (Rows(count, 2048),))
    assert len(step.all_reduces) == 160
    assert [kernel.name for kernel in step.decisions].count(ALL_GATHER) == 1
    assert step.bytes <= bound * step.needed_bytes


def predict_sum(size: int, ranks: int, *, symmetric_memory: bool = False) -> float:
    """Seconds of a step that only sums."""
    step = StepCount((Kernel(ALL_REDUCE, size), Kernel(WAIT, 0)), 0, 0, 0, 0, ranks=ranks)
    found = predict(step, symmetric_memory=symmetric_memory)
    assert found.seconds == found.all_reduce_seconds
    return found.seconds


@pytest.mark.parametrize("symmetric_memory", [False, True], ids=["off", "on"])
def test_a_rank_sends_of_a_sum_what_it_adds_for_others_and_what_it_has_added(symmetric_memory: bool) -> None:
    """NCCL sums what is large either way."""
    two, eight = (predict_sum(90 << 20, ranks, symmetric_memory=symmetric_memory) for ranks in (2, 8))
    assert two == pytest.approx(8.4e-6 + 2 * 3.4e-6 + 1.0 * (90 << 20) / 450e9)
    assert eight == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1.75 * (90 << 20) / 450e9)


@pytest.mark.parametrize(("size", "each"), [(256 << 10, 7.0), (257 << 10, 1.75)], ids=["one shot", "two-shot"])
def test_a_rank_reads_all_of_a_small_sum_through_symmetric_memory(size: int, each: float) -> None:
    """The bound is where the ranks change the kernel that sums."""
    assert predict_sum(size, 8, symmetric_memory=True) == pytest.approx(8e-6 + each * size / 450e9)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (16 << 10, 6.6e-6 + 14 * 0.6e-6 + 1.75 * (16 << 10) / 141e9),
        (4 << 20, 14e-6 + 14 * 1.9e-6 + 1.75 * (4 << 20) / 414e9),
    ],
    ids=["LL", "LL128"],
)
def test_by_default_nccl_takes_the_protocol_that_is_quickest_for_the_size(size: int, seconds: float) -> None:
    assert predict_sum(size, 8) == pytest.approx(seconds)
    assert predict_sum(size, 8, symmetric_memory=True) < seconds


def test_the_command_predicts_as_the_setting_says_and_tells_which(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, LARGE.name, 2)
    monkeypatch.setattr(prediction, "STEPS", {"decode": (Rows(1, 2048),)})
    printed = {
        choice: CliRunner().invoke(simulate, ["step", "--model", LARGE.name, "--ranks", "8", *choice]).output
        for choice in ((), ("--symmetric-memory", "off"), ("--symmetric-memory", "on"))
    }
    by_default, off, on = printed.values()
    said = "what the host does before and after these kernels, and its waits for the GPU, 1 a step."
    assert by_default == off != on
    assert all(said in " ".join(one.split()) for one in printed.values())
    assert "one rank of 8, sums by NCCL," in " ".join(off.split())
    assert "one rank of 8, small sums through symmetric memory," in " ".join(on.split())


def test_the_prompt_tokens_that_a_gpu_takes_beside_decoding_cost_the_prompt_little() -> None:
    """The rule of `deploy.roofline`: four times the tokens for which products are balanced."""
    found = {bound: chunked_prompt(SMALL, bound, 16384, Rows(32, 2048)) for bound in (256, 1024, 2048)}
    prompt = {bound: one.prompt_seconds / found[2048].prompt_seconds for bound, one in found.items()}
    wait = {bound: one.mean_seconds / found[2048].mean_seconds for bound, one in found.items()}
    assert (prompt[1024], wait[1024]) == pytest.approx((1.08, 0.54), abs=0.02)
    assert (prompt[256], wait[256]) == pytest.approx((1.6, 0.2), abs=0.02)


def test_the_command_predicts_a_prompt_by_the_most_of_its_tokens_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, SMALL.name, 2)
    monkeypatch.setattr(prediction, "PROMPT_BOUNDS", (1024, 2048))
    printed = CliRunner().invoke(simulate, ["step", "--prompts"]).output
    assert "a prompt of 16384 tokens beside 32 sequences of 2048" in " ".join(printed.split())
    assert "leave out what the host does before and after these kernels" in " ".join(printed.split())
    rows = [line.split() for line in printed.splitlines() if line.split()[:1] in (["1024"], ["2048"])]
    first, second = ([float(cell) for cell in row] for row in rows)
    assert len(first) == len(second) == 5
    assert first[2] < second[2]
    assert first[4] > second[4]


def test_ranks_sum_one_half_of_many_rows_while_they_multiply_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = shorten(monkeypatch, LARGE.name, 3)
    halves = count_step(LARGE, (Rows(1, 0, fresh=2048),))
    monkeypatch.setattr(fused_layers, "LEAST_IN_HALVES", 4096)
    whole = count_step(LARGE, (Rows(1, 0, fresh=2048),))
    assert len(halves.all_reduces) == 4 * layers
    assert len(whole.all_reduces) == 2 * layers
    assert sum(halves.all_reduces) == sum(whole.all_reduces)
    assert halves.flops == whole.flops
    saved = predict(whole).seconds - predict(halves).seconds
    assert saved > 0.4 * predict(whole).all_reduce_seconds  # half of it, but that two halves wait twice


@pytest.mark.parametrize("rows", [(Rows(64, 2048),), (Rows(8, 300, nodes=7),)], ids=["decode", "verify"])
def test_packed_weights_take_no_more_launches_than_plain_ones(
    rows: tuple[Rows, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = shorten(monkeypatch, SMALL.name, 3)
    packed, plain = count_step(PACKED, rows), count_step(SMALL, rows)
    assert packed.layer_kernels == plain.layer_kernels == 9
    assert sum(kernel.name == "group_product" for kernel in packed.kernels) == 4 * layers
    assert packed.flops == plain.flops
    assert packed.copies == plain.copies


def test_packed_weights_take_less_time_for_one_row_and_more_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 a layer's products with one row take 0.77 of the time of plain ones, and 1.5 times as long with 64."""
    shorten(monkeypatch, SMALL.name, 3)
    one, many = (
        [predict(count_step(model, (Rows(count, 300),))).seconds for model in (PACKED, SMALL)] for count in (1, 64)
    )
    assert one[0] < one[1]
    assert many[0] > many[1]


def test_packed_weights_are_read_and_held_as_small_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = shorten(monkeypatch, SMALL.name, 3)
    numbers = layers * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    head, norms = 2 * 128256 * 4096, 2 * (2 * layers + 1) * 4096
    step = count_step(PACKED, (Rows(1, 2048),))
    assert step.weight_bytes == numbers // 2 + numbers // 128 * 4 + head + norms
    assert step.bytes <= 1.05 * (step.weight_bytes + step.kv_bytes)
    before = set(linear._entries)
    with fake_device() as device:
        loaded, planned = load(PACKED, device)
        made = [linear._entries[handle].kernel for handle in linear._entries.keys() - before]
        matrices = [kernel.matrix for kernel in made if isinstance(kernel, GpuProduct)]
        words = sum(one.nbytes - one.counters.nbytes for one in matrices)
        assert loaded.module is not None
    assert words + head + norms == planned == step.weight_bytes


@pytest.mark.parametrize(("model", "layers"), [
    (SMALL, 3), (LARGE, 3), (RankModel("Qwen3-30B-A3B"), 3), (RankModel("gpt-oss-20b"), 4), (PACKED, 3)
], ids=["8B", "70B", "mixture", "gpt-oss", "packed"])  # fmt: skip
def test_a_long_prompt_computes_with_no_more_memory_than_its_pool_leaves(
    model: RankModel, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, peaks = 2048, list[int]()

    class Measured(step._CountedPass):
        def count(self, function: Callable[[], object]) -> None:
            def measured() -> None:
                with MemoryCounter() as memory:
                    function()
                peaks.append(memory.peak)

            super().count(measured)

    monkeypatch.setattr(step, "_CountedPass", Measured)
    without_tensors = lambda kernel, region=0, *_: Operation(kernel, region)  # noqa: E731
    monkeypatch.setattr(counted, "Operation", without_tensors)  # those that it holds would count
    shorten(monkeypatch, model.name, layers)
    assert not count_step(model, (Rows(1, 0, fresh=tokens),)).is_captured
    with fake_device() as device:
        left = load(model, device)[0].layer_bytes * tokens
    assert 0.1 * left < peaks[-1] < left


def test_packed_70b_with_graphs_and_32768_tokens_fits_one_device_of_80_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are in groups of 128 as AWQ stores them; the embedding and the head stay in bfloat16.

    All layers are held, and some of them compute the step.
    """
    model, tokens = RankModel("Llama-3.3-70B", group=128), 1 << 15
    before = set(linear._entries)
    with fake_device() as device:
        loaded, read = load(model, device)
        made = [linear._entries[handle].kernel for handle in linear._entries.keys() - before]
        matrices = [kernel.matrix for kernel in made if isinstance(kernel, GpuProduct)]
        words = sum(one.nbytes - one.counters.nbytes for one in matrices)
        loaded = replace(loaded, uses_cuda_graphs=True)
        pool = KvPool(loaded.kv_spec, KvSection(block_size=16), tokens // 16)
        stored = sum(numbers.nbytes for numbers in (*pool.keys, *pool.values))
    numbers, table = 80 * 8192 * (8192 + 2 * 1024 + 8192 + 3 * 28672), 2 * 128256 * 8192
    assert words == numbers // 2 + numbers // 128 * 4
    assert read == words + table + 2 * (2 * 80 + 1) * 8192
    assert stored == 80 * 2 * (tokens + 16) * 8 * 128 * 2  # and a block for the padding of graphs
    assert read + table + loaded.graph_bytes + stored < 80e9
    shorten(monkeypatch, model.name, 3)
    step = count_step(model, (Rows(1, tokens - 1),))
    assert (step.is_captured, step.beside, step.copies) == (True, 0, 1)
    assert step.bytes <= 1.05 * (step.weight_bytes + step.kv_bytes)
