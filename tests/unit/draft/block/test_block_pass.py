"""The passes of a block drafter for serving equal those of the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.draft.rows import SIZE, STATES, TAPS
from workers.draft.block.block_pass import BlockPass
from workers.draft.common.modules.context_window import ContextWindow
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.files import load_drafter


@pytest.mark.parametrize("known", [(0, 29), (20, 29), (3, 4, 28, 29)], ids=["all", "late", "gaps"])
def test_its_passes_equal_the_modules(target: Path, modules: Path, known: tuple[int, ...]) -> None:
    """Positions come piece by piece, and two rows are drafted for at once."""
    loaded = load_drafter(modules / "block", target, torch.float32, torch.device("cpu"))
    module = loaded.module
    assert isinstance(module, BlockDrafter)
    block = BlockPass(module, loaded.ends, "float32")
    windows = [ContextWindow(block.context_shape, block.device) for _ in range(2)]
    anchors = [29, 17]
    for window, anchor in zip(windows, anchors, strict=True):
        pieces = [(0, 9), (9, anchor)] if window is windows[1] else zip(known[::2], known[1::2], strict=True)
        for first, end in pieces:
            taps = STATES[first:end].view(end - first, len(TAPS), SIZE)
            window.store(first, block.context(taps, torch.arange(first, end)))
    found = block.draft([5, 6], anchors, windows)

    for index, anchor in enumerate(anchors):
        fused, keys, values = module.context(STATES[:anchor].float().unsqueeze(0), torch.arange(anchor).unsqueeze(0))
        context = torch.arange(anchor).unsqueeze(0)
        if index == 0:
            is_known = torch.tensor(
                [any(a <= p < b for a, b in zip(known[::2], known[1::2], strict=True)) for p in context[0]]
            )
            context = context.masked_fill(~is_known, -1)
        last = loaded.ends.embed(torch.tensor([[5 + index]]))
        expected = module(last, fused[:, -1:], torch.tensor([[anchor]]), keys, values, context)
        torch.testing.assert_close(found[index], expected[0, 0], rtol=1e-3, atol=1e-4)
