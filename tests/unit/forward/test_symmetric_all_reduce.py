"""All ranks sum small tensors through symmetric memory, or none does; and get equal bits either way.

What a GPU does there is planted on CPUs. The last test needs two GPUs.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

from cluster.core.config.target_section import KvSection, TargetSection
from tests.support.engines.kept_kernels import KEPT
from tests.support.engines.rank_processes import running_ranks
from tests.support.models import tiny
from workers.forward import symmetric_all_reduce
from workers.forward.captured_passes import CudaGraphCapture
from workers.forward.runner import ForwardRow, ModelRunner
from workers.forward.symmetric_all_reduce import (
    AllReduce,
    SymmetricSums,
    bounded_store,
    kind_of,
    reduce_through_symmetric_memory,
)
from workers.kv.pool import KvPool
from workers.model.devices import choose_device
from workers.model.loading import load_model
from workers.ranks import Wait, begin_group, begin_sum_over_ranks, sum_over_ranks
from workers.verify import build
from workers.verify.group import join_group

KB, MB = 1 << 10, 1 << 20
RANKS, SECONDS, LAYERS = 3, 60.0, 2
WITHOUT_TWO_GPUS = torch.cuda.device_count() < 2


@pytest.mark.parametrize(
    ("ranks", "one_shot", "two_shot"),
    [(2, 10 * MB, 0), (3, 512 * KB, 10 * MB), (4, 512 * KB, 10 * MB), (5, 256 * KB, 10 * MB), (8, 256 * KB, 10 * MB)],
)
def test_the_size_decides_what_sums(ranks: int, one_shot: int, two_shot: int) -> None:
    assert kind_of(16, ranks) is AllReduce.ONE_SHOT
    assert kind_of(one_shot, ranks) is AllReduce.ONE_SHOT
    if two_shot:
        assert kind_of(one_shot + 1, ranks) is AllReduce.TWO_SHOT
        assert kind_of(two_shot, ranks) is AllReduce.TWO_SHOT
    assert kind_of(10 * MB + 1, ranks) is AllReduce.NCCL


@pytest.mark.parametrize("ranks", [1, 9, 16])
def test_one_rank_and_more_than_a_host_has_gpus_are_left_to_the_group(
    ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    make = Mock()
    caplog.set_level("WARNING")
    assert kind_of(16, ranks) is AllReduce.NCCL
    assert not reduce_through_symmetric_memory(torch.bfloat16, torch.device("cpu"), ranks, make)
    make.assert_not_called()
    assert "target.symmetric_memory: on has no effect" in caplog.text
    assert f"needed 2 to 8 ranks, found {ranks}" in caplog.text


def test_the_buffer_is_allocated_before_the_pool_takes_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tiny.save(tmp_path, tiny.llama()))
    asked = TargetSection(path=path, device="cpu", compile="off", native="off", symmetric_memory="on")
    order = Mock()
    order.pool.side_effect = RuntimeError("enough")
    monkeypatch.setattr(build, "_reduce_through_symmetric_memory", order.buffer)
    monkeypatch.setattr(build, "blocks_that_fit", order.pool)
    by_default = asked.model_copy(update={"symmetric_memory": "off"})
    model = load_model(asked)
    for section in (asked, by_default):
        with pytest.raises(RuntimeError, match="enough"):
            build._make(section, 0, model, None)
    assert [name for name, *_ in order.mock_calls] == ["buffer", "pool", "pool"]


@pytest.mark.parametrize(
    ("changes", "device", "uses_cuda_graphs", "reason"),
    [
        ({}, "cuda", True, ""),
        ({"tensor_parallel": 1}, "cuda", True, "target.tensor_parallel is 1, so there is nothing to sum"),
        ({}, "cpu", False, "it is for GPUs, and the target is on cpu"),
        ({"compile": "off"}, "cuda", False, "target.compile is off"),
        ({}, "cuda", False, "the model's recurrent layers run without CUDA graphs"),
    ],
    ids=["it has", "one rank", "a CPU", "not compiled", "no graphs"],
)
def test_a_setting_without_effect_is_named_once_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    device: str,
    uses_cuda_graphs: bool,
    reason: str,
) -> None:
    reduce = Mock()
    monkeypatch.setattr(build, "reduce_through_symmetric_memory", reduce)
    caplog.set_level("WARNING")
    section = TargetSection(symmetric_memory="on", **({"tensor_parallel": 2} | changes))
    model: Any = SimpleNamespace(dtype=torch.bfloat16, device=torch.device(device), uses_cuda_graphs=uses_cuda_graphs)
    for rank in range(section.tensor_parallel):
        build._reduce_through_symmetric_memory(section, model, rank)
    expected = [f"target.symmetric_memory: on has no effect: {reason}"] if reason else []
    assert [record.getMessage() for record in caplog.records] == expected
    assert reduce.call_count == (0 if reason else 2)


def sums_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sums of 8 ranks with a buffer on the CPU, for which PyTorch has the kernels' names and arguments alone."""
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    sums: Any = SymmetricSums.__new__(SymmetricSums)
    sums._buffer, sums._group, sums._ranks, sums._stream = torch.empty(5 * MB, dtype=torch.bfloat16), "0", 8, Mock()
    return sums


@pytest.mark.parametrize(
    ("rows", "kernel"), [(16, "symm_mem::one_shot_all_reduce_out"), (17, "symm_mem::two_shot_all_reduce_")]
)
def test_pytorch_knows_the_kernels(rows: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch looks for a kernel only after it has accepted the arguments."""
    part = torch.ones((rows, 8 * KB), dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=f"{kernel}' "):
        sums_on_cpu(monkeypatch).begin(part)


@pytest.mark.parametrize(
    "part",
    [
        torch.ones(8),
        torch.ones((8, 16), dtype=torch.bfloat16).t(),
        torch.ones(9, dtype=torch.bfloat16),
        torch.ones(16, dtype=torch.bfloat16)[4:12],
        torch.ones(5 * MB + 8, dtype=torch.bfloat16),
    ],
    ids=["another type", "not contiguous", "an odd size", "an odd begin", "larger than the buffer"],
)
def test_what_the_kernels_do_not_take_is_left_to_the_group(part: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sums_on_cpu(monkeypatch).begin(part) is None


# --- ranks on CPUs -------------------------------------------------------------------------------


class PlantedSums:
    """Sums in the order of ranks, as the kernels do. On rank 1 it does what `fault` says."""

    def __init__(self, fault: str) -> None:
        self.fault, self.calls = fault, 0
        self._is_faulty = distributed.get_rank() == 1
        if self._is_faulty and fault == "has no memory":
            raise RuntimeError("no memory")

    def connect(self) -> None:
        """Wait for all ranks in the store, as PyTorch does."""
        with bounded_store(timedelta(seconds=1 if self.fault == "reaches no GPU" else SECONDS)):
            group = distributed.distributed_c10d._get_default_group()
            store = distributed.distributed_c10d._get_process_group_store(group)
            if self._is_faulty and self.fault == "reaches no GPU":
                raise RuntimeError("no peer access")
            store.set(f"{self.fault} {distributed.get_rank()}", "here")
            store.wait([f"{self.fault} {rank}" for rank in range(RANKS)])

    def begin(self, part: torch.Tensor) -> Wait | None:
        """Add at once. The sum is in `part` after waiting."""
        self.calls += 1
        parts = [torch.empty_like(part) for _ in range(RANKS)]
        distributed.all_gather(parts, part)
        if self._is_faulty and self.fault == "adds in another order":
            parts.reverse()
        total = parts[0].clone()
        for one in parts[1:]:
            total += one
        if self._is_faulty and self.fault == "adds wrongly":
            total += 1
        if self._is_faulty and self.fault == "fails in a kernel":
            raise RuntimeError("no kernel image")

        def wait() -> None:
            part.copy_(total)

        return wait


FAULTS = {
    "has no memory": "no memory",
    "reaches no GPU": "no peer access",
    "fails in a kernel": "no kernel image",
    "adds wrongly": "it adds otherwise than the process group",
    "adds in another order": "ranks get sums of other bits than others",
}
"""What rank 1 logs for each fault."""


def sums_are_right(rank: int) -> bool:
    """Whether the ranks' drawn numbers are summed in the order of ranks."""
    parts = [torch.randn(500, generator=torch.Generator().manual_seed(one)) for one in range(RANKS)]
    found = parts[rank].clone()
    sum_over_ranks(found)
    return torch.equal(found, parts[0] + parts[1] + parts[2])


def serve_faults(rank: int, port: int, pipe: Connection) -> None:
    """Send, for each fault, whether the ranks use it, what is logged, whether sums are right then, and who sums."""
    torch.set_num_threads(1)
    join_group(TargetSection(device="cpu", tensor_parallel=RANKS), rank, "127.0.0.1", port)
    symmetric_all_reduce.logger.warning = warned = Mock()  # type: ignore[method-assign]
    for fault in FAULTS:
        made: list[PlantedSums] = []

        def make(*_: object, fault: str = fault, made: list[PlantedSums] = made) -> PlantedSums:
            made.append(PlantedSums(fault))
            return made[-1]

        used = reduce_through_symmetric_memory(torch.float32, torch.device("cpu"), RANKS, make)
        before = sum(one.calls for one in made)
        is_right = sums_are_right(rank)
        pipe.send((used, str(warned.call_args.args[1]), is_right, sum(one.calls for one in made) - before))
    distributed.barrier()
    os._exit(0)


def serve_model(rank: int, section: TargetSection, port: int, pipe: Connection) -> None:
    """Send whether the sums are used, how many a step has, and whether its logits stay the same."""
    torch.set_num_threads(1)
    join_group(section, rank, "127.0.0.1", port)
    model = load_model(section, rank=rank, tensor_parallel=RANKS)
    expected = logits(model, section)
    sums = PlantedSums("none")
    used = reduce_through_symmetric_memory(model.dtype, model.device, RANKS, lambda *_: sums)
    tried = sums.calls
    found = logits(model, section)
    summed = sums.calls - tried
    begin_group()
    logits(model, section)
    pipe.send((used, tried, summed, torch.equal(found, expected), sums.calls - tried - summed))
    distributed.barrier()
    os._exit(0)


def logits(model: Any, section: TargetSection) -> torch.Tensor:
    """The logits of one token of a prompt."""
    pool = KvPool(model.kv_spec, section.kv, 50)
    row = ForwardRow(pool.new_table(), tuple(range(3, 12)), select=(8,))
    pool.reserve(row.table, row.end)
    return ModelRunner(model, pool).forward([row]).clone()


def answers(run: Any, *arguments: object, count: int = 1, ranks: int = RANKS) -> list[list[Any]]:
    """What each of the ranks sends."""
    with running_ranks(ranks, run, *arguments) as running:
        return [[running.answer(rank) for _ in range(count)] for rank in range(ranks)]


@pytest.mark.slow
def test_ranks_of_which_one_cannot_leave_all_sums_to_the_group() -> None:
    found = answers(serve_faults, count=len(FAULTS))
    for rank, sent in enumerate(found):
        for (used, logged, is_right, calls), reason in zip(sent, FAULTS.values(), strict=True):
            assert (used, is_right, calls) == (False, True, 0), reason
            assert rank != 1 or reason in logged
            assert logged
    assert "timeout" in found[0][1][1]  # it has waited for rank 1


@pytest.mark.slow
def test_the_sums_of_a_model_go_through_what_passed_its_trial(tmp_path: Path) -> None:
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 192}
    section = TargetSection(
        path=str(tiny.save(tmp_path, tiny.llama(**shape, num_hidden_layers=LAYERS))),
        device="cpu",
        compile="off",
        compile_directory=str(KEPT),
        tensor_parallel=RANKS,
        kv=KvSection(block_size=4),
    )
    for [(used, tried, summed, is_equal, after)] in answers(serve_model, section):
        assert used
        assert tried == 2 * len(symmetric_all_reduce._TRIED)
        assert summed == 2 * LAYERS  # `transformers` sums the embeddings itself
        assert is_equal
        assert after == 0


# --- ranks on GPUs -------------------------------------------------------------------------------


def serve_on_gpu(rank: int, sees_one: bool, ranks: int, port: int, pipe: Connection) -> None:
    """Send whether the sums are used, and the sizes whose sums are not those in the order of ranks, with graphs too."""
    if sees_one:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    join_group(TargetSection(device="cuda", tensor_parallel=ranks), rank, "127.0.0.1", port)
    device = choose_device("cuda", rank)
    torch.cuda.set_device(device)
    pipe.send(reduce_through_symmetric_memory(torch.bfloat16, device, ranks))
    pipe.send([size for size in (16, 8 * KB, 256 * KB, MB, 10 * MB) if differs(size, rank, ranks, device)])
    distributed.barrier()
    os._exit(0)


@torch.inference_mode()
def differs(size: int, rank: int, ranks: int, device: torch.device) -> bool:
    """Whether two sums that go on at once have other bits than the sums in the order of ranks, replayed or not."""
    parts = [
        torch.randn((2, size // 2), generator=torch.Generator().manual_seed(one)).to(device, torch.bfloat16)
        for one in range(ranks)
    ]
    expected = parts[0].clone()
    for one in parts[1:]:
        expected += one
    found = torch.empty_like(expected)

    def step() -> None:
        found.copy_(parts[rank])
        waits = [begin_sum_over_ranks(half) for half in found]
        for wait in waits:
            wait()

    step()
    is_equal = torch.equal(found, expected)
    replay = CudaGraphCapture(device)(step)
    for _ in range(3):
        replay()
    return not (is_equal and torch.equal(found, expected))


@pytest.mark.cuda
@pytest.mark.skipif(WITHOUT_TWO_GPUS, reason="needs two NVIDIA GPUs that an NVLink switch joins")
@pytest.mark.parametrize("sees_one", [True, False], ids=["each rank sees its own GPU", "each rank sees all GPUs"])
def test_ranks_on_gpus_sum_in_their_order(sees_one: bool) -> None:
    ranks = min(torch.cuda.device_count(), 8)
    for used, differing in answers(serve_on_gpu, sees_one, ranks, count=2, ranks=ranks):
        assert used
        assert differing == []
