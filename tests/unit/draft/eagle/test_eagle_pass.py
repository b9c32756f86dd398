"""The passes of an EAGLE head for serving equal those of the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.drafting import DraftBudget
from tests.support.models.drafting_modules import causal_mask
from tests.unit.draft.rows import SAMPLED, SIZE, STATES, TAPS, TOKENS, row
from workers.draft.common.modules.context_store import ContextStore
from workers.draft.common.trees.calibration import Calibration
from workers.draft.eagle.eagle_growth import EagleGrowth
from workers.draft.eagle.eagle_pass import EaglePass
from workers.draft.eagle.eagle_session import EagleSession
from workers.draft.eagle.head_pass import committed_piece
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.files import Drafter, load_drafter

WINDOW, SCRATCH = 16, 20
CPU = torch.device("cpu")


@pytest.fixture
def loaded(target: Path, modules: Path) -> Drafter:
    return load_drafter(modules / "eagle", target, torch.float32, CPU)


def whole(loaded: Drafter, tokens: list[int], length: int) -> torch.Tensor:
    """The module's outputs [tokens - 1, hidden size]: taps below `length`, its own outputs beyond."""
    module = loaded.module
    assert isinstance(module, EagleHead)
    fused = module.fusion(STATES[:length].float())
    following = loaded.ends.embed(torch.tensor(tokens[1:]))
    keys, values = module.no_past(1)
    outputs: list[torch.Tensor] = []
    for position in range(len(tokens) - 1):
        feature = fused[position] if position < length else outputs[-1]
        context = torch.arange(position + 1).unsqueeze(0)
        own = torch.tensor([[position]])
        mask = causal_mask(module, own, context)
        output, key, value = module(
            feature.view(1, 1, -1), following[position].view(1, 1, -1), own, (keys, values), mask
        )
        keys, values = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
        outputs.append(output[0, 0])
    return torch.stack(outputs)


def test_committed_tokens_piece_by_piece_and_paths_of_a_tree_equal_the_modules_chain(loaded: Drafter) -> None:
    module = loaded.module
    assert isinstance(module, EagleHead)
    head = EaglePass(module, loaded.ends, "float32", SCRATCH)
    length = 40  # longer than the window
    start = row(length, sampling=SAMPLED).start
    assert start is not None
    session = EagleSession(start, head.context_shape, ContextStore(0, torch.float32), CPU)
    session.replace(0, TOKENS[:length])
    output = torch.empty(0)
    for first, end in ((0, 20), (20, 27), (27, 28), (28, 39)):
        taps = STATES[first:end].view(end - first, len(TAPS), SIZE)
        piece = committed_piece(session.window, first, TOKENS[first + 1 : end + 1], WINDOW)
        output = head.run(head.features(taps), [piece])[0]
        session.window.mark(first, end)
        torch.testing.assert_close(output, whole(loaded, TOKENS[: end + 1], end)[-1], rtol=1e-3, atol=1e-4)

    growth = EagleGrowth(session, output, DraftBudget(64, 8), WINDOW, SCRATCH)
    tokens, confidences = [[5, 9]], [[0.6, 0.4]]
    for depth in range(1, 4):
        growth.add(tokens, confidences, Calibration())
        assert growth.choose(depth, width=4, first_rate=0.9)
        outputs = head.run(torch.stack(growth.features()), [growth.piece()])
        growth.keep_outputs(outputs)
        for node, mine in zip(growth.frontier, outputs, strict=True):
            expected = whole(loaded, [*TOKENS[:length], *node.path_tokens()], length - 1)[-1]
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-4)
        tokens, confidences = [[7, 8]] * len(growth.frontier), [[0.5, 0.5]] * len(growth.frontier)
