"""Training of drafting modules mixes no tensors of two devices: it runs on a device that is not the default one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.engines.fake_device import fake_device, moved
from tests.support.models import drafting_modules, tiny
from workers.distill.modules.batches import TapBatch
from workers.distill.modules.exit_search import _choices
from workers.distill.modules.paths import predict
from workers.distill.modules.start import copy_layers, fit_context
from workers.model.draft_shapes import BlockShape, LayerShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import make_module

HIDDEN, VOCABULARY, ROWS, LENGTH, TAPS = 48, tiny.VOCABULARY, 3, 12, 2
LAYER = LayerShape(HIDDEN, 6, 3, 8, 80, 10000.0, 1e-6, 64)


class Ends(TargetEnds):
    """A target's ends whose embedding has no numbers that a scale could be computed from."""

    def embedding_scale(self) -> float:
        return 1.0


def ends() -> TargetEnds:
    return Ends(torch.zeros(VOCABULARY, HIDDEN), torch.zeros(VOCABULARY, HIDDEN), torch.zeros(HIDDEN), 1e-6, None)


def batch(device: torch.device, taps: int = TAPS) -> TapBatch:
    def whole(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    states = torch.zeros(ROWS, LENGTH, taps * HIDDEN, dtype=torch.bfloat16, device=device)
    known = torch.zeros(ROWS, LENGTH, 4, device=device)
    return TapBatch(whole(ROWS, LENGTH), whole(ROWS), states, whole(ROWS), whole(ROWS, LENGTH, 4), known)


def test_tensors_of_two_devices_raise() -> None:
    with fake_device() as device, pytest.raises(RuntimeError, match="same device"):
        torch.zeros(3, device=device) + torch.zeros(3)


def test_the_context_of_a_block_drafter_is_fitted() -> None:
    with fake_device() as device:
        own = ends()
        module = moved(BlockDrafter(own, BlockShape(LAYER, 2, 3, 0), TAPS), device)
        target: Any = AutoModelForCausalLM.from_config(tiny.llama(num_hidden_layers=3))
        with torch.no_grad():
            copy_layers(module, target.state_dict(), (0, 1, 2))
        fit_context(module, moved(own, device), [batch(device), batch(device)])


def test_the_search_for_an_exit_runs_the_target() -> None:
    with fake_device() as device:
        target: Any = moved(AutoModelForCausalLM.from_config(tiny.llama()), device)
        assert _choices(target, [(3, 4, 5, 6), (7, 8, 9)], [1, 0]).device.type == device.type


@pytest.mark.parametrize("kind", ["heads", "block", "exit"])
def test_paths_are_predicted(kind: str) -> None:
    with fake_device() as device:
        own = ends()
        module = moved(make_module(own, drafting_modules.shapes(HIDDEN)[kind], (1, 2)), device)
        assert predict(module, moved(own, device), batch(device)).hidden.device.type == device.type
