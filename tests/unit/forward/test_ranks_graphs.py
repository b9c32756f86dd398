"""A step with the collectives of tensor parallelism can be recorded, and the texts stay those of one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

from cluster.core.config.sections import Configuration
from cluster.core.drafting import DraftBudget
from tests.support.engines.colocated_decoding import decode_together, plain_answers
from tests.support.engines.graph_replay import FakeRecorder, decode_with_trees, open_engine
from tests.support.engines.one_rank import group_of_one
from tests.support.engines.rank_group import REQUESTS, configure_ranks, rank_group
from tests.support.models import tiny
from workers.forward.captured_passes import CudaGraphCapture
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine
from workers.verify.group_decider import GroupDecider

pytestmark = pytest.mark.slow

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and NCCL"),
        ],
    ),
]
LAYERS, COUNT = 2, 16


class Recorder(FakeRecorder):
    """Records CUDA graphs on a GPU. On CPU, a replay calls the function again. Counts the collectives inside."""

    def __init__(self, device: str, reduced: Mock) -> None:
        super().__init__()
        self._capture = CudaGraphCapture(torch.device(device)) if device == "cuda" else None
        self._reduced = reduced
        self.collectives: set[int] = set()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        def counted() -> None:
            before = self._reduced.call_count
            function()
            self.collectives.add(self._reduced.call_count - before)

        if self._capture is None:
            return super().__call__(counted)
        self.recorded += 1
        replay = self._capture(counted)

        def counted_replay() -> None:
            self.replayed += 1
            replay()

        return counted_replay


def check(engine: TargetEngine, answers: Sequence[Sequence[int]], temperature: float) -> None:
    """The engine decodes the answers. Nothing refers to it afterwards."""
    for seed, answer in enumerate(answers):
        assert decode_with_trees(engine, f"s{seed}", seed, temperature, answer) == answer


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("device", DEVICES)
def test_texts_are_equal_alone_in_a_group_and_with_recorded_collectives(
    device: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft trees contain tokens of the answer and wrong tokens, so that several sizes of step recur."""
    directory = tiny.save(tmp_path, tiny.llama(num_hidden_layers=LAYERS))
    reduced = Mock(wraps=distributed.all_reduce)
    monkeypatch.setattr(distributed, "all_reduce", reduced)
    alone = open_engine(directory, None, device)
    answers = [decode_with_trees(alone, f"s{seed}", seed, temperature, ()) for seed in range(3)]
    assert reduced.call_count == 0
    with group_of_one(device):
        record = Recorder(device, reduced)
        for recorder in (None, record):
            check(open_engine(directory, recorder, device, lambda model: GroupDecider(model, 0)), answers, temperature)
            assert reduced.call_count > 0
    assert record.recorded > 1
    assert record.replayed > 10  # sizes are recorded before the first step
    assert record.collectives == {2 * LAYERS}  # after each attention and each feed-forward network


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs and NCCL")
def test_two_ranks_on_gpus_replay_graphs_and_write_the_texts_of_one(tmp_path: Path) -> None:
    """The passes of drafts are graphs, too."""
    directory = tiny.shift(tiny.save(tmp_path, tiny.llama(num_hidden_layers=LAYERS)))

    def configure(ranks: int) -> Configuration:
        return configure_ranks(directory, ranks, layers=LAYERS, device="cuda", compile="auto", pool_bytes=1 << 24)

    expected = plain_answers(build_engine(configure(1).target).step, REQUESTS, COUNT)
    with rank_group(2, "cuda") as processes:
        group = processes.form(configure(2))
        assert group.captured() > 1
        found = decode_together(group.step, REQUESTS, COUNT, DraftBudget(4, 4))
        group.close()
    assert {name: decoded.answer[:COUNT] for name, decoded in found.items()} == expected
    assert all(decoded.accepted for decoded in found.values())
