"""Drafts of modules whose passes are CUDA graphs, on a GPU or interpreted: those of passes that are launched."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.core.drafting import DraftBudget, Proposal
from deploy.implied_settings import with_implied_settings
from tests.gpu_proof.device import DEVICE, needs_kernels
from tests.support.engines.graph_replay import FakeRecorder
from tests.unit.draft.contract.methods import Directories, make_directories, values
from tests.unit.draft.contract.rounds import SAMPLINGS, SimulatedSequence, check_proposal
from workers.draft.block import block_drafter
from workers.draft.common.modules import decoder_stack, layer_stack
from workers.draft.eagle import eagle_drafter, head_pass
from workers.draft.heads import heads_drafter
from workers.draft.mtp import mtp_pass
from workers.draft.registry import create, needs_of
from workers.forward import graph_sizes, window_attention
from workers.forward.captured_passes import CudaGraphCapture
from workers.forward.graph_sizes import DraftingSize
from workers.forward.layer_kernels import TritonKernels
from workers.serve.configuration import load_configuration

pytestmark = [
    *needs_kernels(),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter computes with what padding holds
]

NAMES = ("block", "block:dflash", "block:dspark", "eagle", "eagle:eagle3", "eagle:peagle", "heads", "mtp")
ROUNDS = 3


class Recorder(FakeRecorder):
    """Captures CUDA graphs on a GPU. Elsewhere, a replay calls the function again. Counts both."""

    def __init__(self) -> None:
        super().__init__()
        self._capture = CudaGraphCapture(DEVICE) if DEVICE.type == "cuda" else None

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        if self._capture is None:
            return super().__call__(function)
        self.recorded += 1
        replay = self._capture(function)

        def counted() -> None:
            self.replayed += 1
            replay()

        return counted


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    root: Path = tmp_path_factory.mktemp("models")
    return make_directories(root)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch computes the layers and the interpreted kernels attend, as on a GPU, in a few sizes."""
    if DEVICE.type == "cuda":
        return
    from workers.forward.triton import windows

    monkeypatch.setattr(layer_stack, "products_normalise", lambda _: False)
    for module in (layer_stack, decoder_stack):
        monkeypatch.setattr(module, "pack_window_layers", lambda *_: None)
        monkeypatch.setattr(module, "operations_on", lambda *_: TritonKernels())
    monkeypatch.setattr(window_attention, "kernels_for", lambda *_: windows)
    monkeypatch.setattr(graph_sizes, "_ROWS", (2,))
    monkeypatch.setattr(head_pass, "drafting_graph_sizes", lambda *_: [DraftingSize(2, 8)])


def drafts(name: str, directories: Directories, recorder: Recorder | None, patch: pytest.MonkeyPatch) -> list[Proposal]:
    """The proposals of some rounds, with captured passes if there is a recorder."""
    for module in (block_drafter, eagle_drafter, heads_drafter, mtp_pass):
        patch.setattr(module, "capture_of", lambda *_: recorder)
    settings = values(name, directories)
    settings["target"]["device"] = DEVICE.type
    method = settings["draft"]["methods"][0]
    settings["draft"][method]["weights"] = "float32"
    configuration = with_implied_settings(load_configuration(settings))
    drafter, needs = create(configuration.draft, configuration.target), needs_of(configuration.draft)
    recorded = 0 if recorder is None else recorder.recorded
    sequences = [
        SimulatedSequence(f"s{number}", random.Random(number), needs, sampling)
        for number, sampling in enumerate(SAMPLINGS[:2])
    ]
    found: list[Proposal] = []
    for _ in range(ROUNDS):
        rows = [sequence.row(DraftBudget(6, 3)) for sequence in sequences]
        proposals = drafter.propose(rows)
        for sequence, row, proposal in zip(sequences, rows, proposals, strict=True):
            check_proposal(row, proposal)
            sequence.sent_len = row.base_len
            sequence.verify(proposal.tree)
        found += proposals
    assert recorder is None or recorder.recorded == recorded, "nothing is captured while serving"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_captured_passes_draft_what_launched_passes_draft(
    name: str, directories: Directories, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, planned = Recorder(), list[int]()
    plan = window_attention.WindowAttention.plan

    def counted(self: window_attention.WindowAttention, *step: object) -> window_attention.WindowStep:
        planned.append(1)
        return plan(self, *step)  # type: ignore[arg-type]

    monkeypatch.setattr(window_attention.WindowAttention, "plan", counted)
    expected = drafts(name, directories, None, monkeypatch)
    launched = len(planned)
    assert (launched > 0) is (name != "heads")
    found = drafts(name, directories, recorder, monkeypatch)
    assert recorder.recorded > 0
    assert recorder.replayed > 0
    if DEVICE.type == "cuda" and launched:
        assert (recorder.replayed, len(planned)) == (launched, launched), "every pass has a graph"
    assert len(planned) - launched + recorder.replayed == (launched or recorder.replayed)
    assert sum(len(proposal.tree) for proposal in found) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.tree == other.tree
        torch.testing.assert_close(
            torch.tensor(one.probabilities), torch.tensor(other.probabilities), rtol=1e-3, atol=1e-4
        )


class Refusing(Recorder):
    """Finds at first no memory, or that nothing can be captured; then it captures."""

    def __init__(self, error: RuntimeError) -> None:
        super().__init__()
        self._error: RuntimeError | None = error

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return super().__call__(function)


@pytest.mark.parametrize(
    ("error", "captures", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True, "run without a CUDA graph"),
        (RuntimeError("called a synchronizing CUDA operation"), False, "no further passes are captured"),
    ],
    ids=["memory", "refused"],
)
def test_passes_that_cannot_be_captured_are_launched(
    error: RuntimeError,
    captures: bool,
    told: str,
    directories: Directories,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Refusing(error)
    found = drafts("eagle", directories, recorder, monkeypatch)
    assert told in caplog.text
    assert (recorder.replayed > 0) is captures
    assert [one.tree for one in found] == [one.tree for one in drafts("eagle", directories, None, monkeypatch)]
