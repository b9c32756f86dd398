"""What the layers of drafting modules launch beside products and attention, interpreted or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.core.request import SamplingParameters, SequenceStart
from tests.gpu_proof.device import DEVICE, needs_kernels
from tests.support.models import drafting_modules, tiny
from workers.draft.block.block_pass import BlockPass
from workers.draft.block.block_passes import BlockPasses
from workers.draft.common.modules import layer_stack
from workers.draft.common.modules.context_session import ContextSession
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.modules.context_window import ContextRows, ContextShape, ContextWindow
from workers.draft.common.modules.stream_operations import operations_on, trial_difference
from workers.forward import window_attention
from workers.forward.layer_kernels import TritonKernels
from workers.forward.window_attention import WindowAttention, WindowHeads
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.files import load_drafter

pytestmark = needs_kernels()

SHAPE = ContextShape(layers=2, kv_heads=2, head_width=16, feature_size=24, window=40, scratch=4)


@pytest.mark.parametrize(("dim", "inner"), [(64, 96), (48, 130)])
def test_the_trial_of_norms_and_gates_agrees(dim: int, inner: int) -> None:
    assert trial_difference(TritonKernels(), DEVICE, dim, inner) < 1e-5
    assert not isinstance(operations_on(torch.device("cpu"), dim, inner), TritonKernels)


def test_a_block_computes_the_same_with_kernels_between_its_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms that come before a product instead of inside of it, and additions that are part of a norm."""
    target = tiny.save(tmp_path / "target", tiny.llama())
    drafting_modules.save(target, tmp_path / "block", "block")
    found = []
    monkeypatch.setattr(layer_stack, "pack_window_layers", lambda *_: None)
    for has_kernels in (False, True):
        if has_kernels:
            monkeypatch.setattr(layer_stack, "products_normalise", lambda _: False)
            monkeypatch.setattr(layer_stack, "operations_on", lambda *_: TritonKernels())
        loaded = load_drafter(tmp_path / "block", target, torch.float32, DEVICE)
        assert isinstance(loaded.module, BlockDrafter)
        passes = BlockPass(loaded.module, loaded.ends, "float32")
        window = ContextWindow(passes.context_shape, DEVICE)
        taps = torch.randn((9, 2, loaded.ends.hidden_size), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            window.store(0, passes.context(taps, torch.arange(9)))
            found.append(passes.draft([5], [9], [window]).cpu())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


class Stored(BlockPasses):
    """Passes that only store, with or without kernels."""

    def __init__(self, windows: WindowAttention | None) -> None:
        layers: Any = SimpleNamespace(windows=windows)
        self._layers, self.context_shape = layers, SHAPE

    def context(self, taps: Tensor, positions: Tensor) -> ContextRows:
        raise NotImplementedError

    def _features(self, anchors: Sequence[int], windows: Sequence[ContextWindow]) -> Tensor:
        raise NotImplementedError

    def _entered(self, features: Tensor, last: Tensor) -> Tensor:
        raise NotImplementedError


def test_positions_of_many_sessions_are_stored_together_as_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows grow, shift older positions out, and share full segments."""
    from workers.forward.triton import windows as kernels

    monkeypatch.setattr(window_attention, "kernels_for", lambda *_: kernels)
    attention = WindowAttention(WindowHeads(4, 2, 16, 16), DEVICE)
    launches: list[int] = []
    store_together = attention.store

    def counted(*given: Any) -> None:
        launches.append(1)
        store_together(*given)

    monkeypatch.setattr(attention, "store", counted)
    groups = []
    for passes in (Stored(attention), Stored(None)):
        store = ContextStore(1 << 10, torch.bfloat16)
        start = SequenceStart(4, SamplingParameters())
        sessions = [ContextSession(start, SHAPE, store, DEVICE) for _ in range(3)]
        firsts = [0, 7, 30]
        generator = torch.Generator().manual_seed(2)
        for session in sessions:
            session.replace(0, range(400))
        for turn in range(60):
            counts = [1 + (turn + index) % 4 for index in range(3)]
            tokens = sum(counts)
            keys, values = (
                torch.randn((tokens, 2, 2, 16), generator=generator).to(DEVICE).permute(1, 2, 0, 3) for _ in range(2)
            )
            rows = ContextRows(keys, values, torch.randn((tokens, 24), generator=generator).to(DEVICE))
            with torch.inference_mode():
                passes.store(list(zip(sessions, firsts, counts, strict=True)), rows)
            firsts = [first + count for first, count in zip(firsts, counts, strict=True)]
        groups.append((sessions, firsts, store))
    assert len(launches) == 60
    (mine, firsts, own), (theirs, _, other) = groups
    assert len(own) == len(other) > 3
    for one, two, end in zip(mine, theirs, firsts, strict=True):
        assert one.window.is_known(end - SHAPE.window, end)
        found, expected = (session.window.stored(end - SHAPE.window, end) for session in (one, two))
        for part in ("keys", "values", "features"):
            assert torch.equal(getattr(found, part), getattr(expected, part))
