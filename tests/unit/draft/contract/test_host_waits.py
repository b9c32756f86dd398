"""Drafters with modules on a GPU: the host waits for it only where it reads what to propose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cluster.core.drafting import DraftBudget, Evidence
from deploy.implied_settings import with_implied_settings
from tests.support.engines.graph_replay import FakeRecorder
from tests.support.fakes.host_waits import OnGpu
from tests.unit.draft.contract.methods import Directories, values
from tests.unit.draft.contract.rounds import SAMPLINGS, SimulatedSequence, check_proposal
from workers.draft.block import block_drafter
from workers.draft.common.modules import decoder_stack, layer_stack
from workers.draft.eagle import eagle_drafter
from workers.draft.heads import heads_drafter
from workers.draft.mtp import mtp_pass
from workers.draft.registry import create, needs_of
from workers.forward import graph_sizes, window_attention
from workers.forward.triton.tiles import WindowTiles
from workers.serve.configuration import load_configuration

NAMES = (
    "block",
    "block:dflash",
    "block:dspark",
    "blockwise",
    "eagle",
    "eagle:eagle3",
    "eagle:peagle",
    "heads",
    "mtp",
)
ONE_PASS_PER_DEPTH = ("eagle", "eagle:eagle3", "mtp")
DEPTHS = 5
ROUNDS, FIRST = 9, 5
"""Rounds, and those at the beginning that create cached tensors."""


def with_usual_states(evidence: Evidence) -> Evidence:
    """The evidence with numbers of a usual size: those of the simulated target overflow."""
    if (hidden := evidence.hidden) is None:
        return evidence
    states = torch.randn(len(hidden), hidden.width, generator=torch.Generator().manual_seed(hidden.first)).bfloat16()
    return replace(evidence, hidden=replace(hidden, data=states.view(torch.uint8).numpy().tobytes()))


class NoAttention:
    """Stands for the kernels over windows: it attends to nothing."""

    launches = 0

    def write_windows(self, keys: Tensor, values: Tensor, tiles: WindowTiles, layer: int) -> None:
        assert len(tiles.places) == len(keys) == len(values)
        self.launches += 1

    def write_layers(self, keys: Tensor, values: Tensor, tiles: WindowTiles) -> None:
        assert keys.shape[1] == values.shape[1] == len(tiles.places)

    def window_attention(
        self, queries: Tensor, tiles: WindowTiles, layer: int, kv_heads: int, value_dim: int, scale: float
    ) -> Tensor:
        assert len(tiles.tokens) == len(queries)
        return queries.new_zeros((*queries.shape[:2], value_dim))


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_waits_but_the_reading_of_candidates(
    name: str, is_captured: bool, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, recorder = NoAttention(), FakeRecorder()
    for module in (block_drafter, eagle_drafter, heads_drafter, mtp_pass):
        monkeypatch.setattr(module, "capture_of", lambda *_: recorder if is_captured else None)
    monkeypatch.setattr(graph_sizes, "_ROWS", (4,))
    for module in (layer_stack, decoder_stack):  # torch computes the layers, as on a GPU
        monkeypatch.setattr(module, "pack_window_layers", lambda *_: None)
    monkeypatch.setattr(window_attention, "kernels_for", lambda *_: kernels)
    configuration = with_implied_settings(load_configuration(values(name, directories)))
    method = create(configuration.draft, configuration.target)
    needs = needs_of(configuration.draft)
    sequences = [
        SimulatedSequence(f"s{number}", random.Random(number), needs, sampling)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    recorded, drafted, waits, most_waits = recorder.recorded, 0, set[str](), 0
    for turn in range(ROUNDS):
        rows = [sequence.row(DraftBudget(8, DEPTHS)) for sequence in sequences]
        with OnGpu(notices_copies=True) as gpu:
            proposals = method.propose(rows)
        for sequence, row, proposal in zip(sequences, rows, proposals, strict=True):
            check_proposal(row, proposal)
            sequence.sent_len = row.base_len
            sequence.verify(proposal.tree)
            sequence.evidence[-1] = with_usual_states(sequence.evidence[-1])
        if turn >= FIRST:
            drafted += sum(len(proposal.tree) for proposal in proposals)
            waits |= set(gpu.waits)
            most_waits = max(most_waits, len(gpu.waits))
    assert drafted > 0
    assert waits == {"copies"}, "what is read of a depth arrives together"
    assert most_waits <= (DEPTHS if name in ONE_PASS_PER_DEPTH else 1)
    assert (kernels.launches > 0) is (name not in ("blockwise", "heads"))
    assert (recorder.replayed > 0) is is_captured
    assert recorder.recorded == recorded, "nothing is captured while serving"


def test_the_fake_notices_copies_that_wait() -> None:
    number = torch.zeros(2)
    with OnGpu(notices_copies=True) as gpu:
        number.to(torch.device("cpu"))
        number.to(torch.float64)
        number.to(torch.device("cpu"), non_blocking=True)
        number[[0]] = 1.0
    assert gpu.waits == ["to", "__setitem__"]
