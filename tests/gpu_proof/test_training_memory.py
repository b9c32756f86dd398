"""What `pilotfish distill --plan` says of memory is what the training's own step takes on a fake device."""

from __future__ import annotations

import argparse

import pytest

from deploy.distillation import dspark
from deploy.simulation.device.models import MODELS
from tests.gpu_proof.fake_training import run_block_training, target_size
from workers.distill.memory import BlockBatch, block_flops, block_memory, block_size
from workers.model.public_shapes import MaskedBlockShape

pytestmark = pytest.mark.slow

BELOW, ABOVE = 0.97, 1.10
"""The predicted peak as a share of the counted one: bounds."""
GPU_BYTES = 80e9
ROWS = 100


def shape_for(name: str) -> MaskedBlockShape:
    """The drafter that `pilotfish distill --kind dspark` trains for a target."""
    chosen = dspark.options(["--target", name, "--prompts", "none", "--out", "none"])
    assert isinstance(chosen, argparse.Namespace)
    return dspark.block_shape(MODELS[name], chosen, 3)


@pytest.mark.parametrize(
    ("name", "ranks", "recomputes"),
    [("Llama-3.1-8B", 1, False), ("Llama-3.1-8B", 1, True), ("Llama-3.3-70B", 8, False)],
    ids=["8B", "8B, recomputed", "70B, one of eight"],
)
def test_the_predicted_memory_is_what_a_step_takes(name: str, ranks: int, recomputes: bool) -> None:
    """The module, its optimizers, the target's share and 150,000 tokens of texts fit one GPU of 80 GB each."""
    target, shape, batch = target_size(name), shape_for(name), BlockBatch(12, 1536, 224)

    ran = run_block_training(target, shape, batch, ROWS, ranks=ranks, recomputes=recomputes)

    planned = block_memory(target, shape, batch, ROWS * batch.length, ranks=ranks, recomputes=recomputes)
    assert planned.held == pytest.approx(ran.held, rel=1e-3)
    assert BELOW < planned.peak / ran.peak < ABOVE
    assert ran.peak < GPU_BYTES
    assert ran.parameters == block_size(shape).parameters
    if ranks == 1:
        assert block_flops(target, shape, batch, recomputes=recomputes) == pytest.approx(ran.flops, rel=0.03)
