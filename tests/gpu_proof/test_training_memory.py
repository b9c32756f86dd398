"""What `pilotfish distill --plan` says of memory is what the training's own step takes on a fake device."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from deploy.distillation import dspark, eagle3
from deploy.simulation.device.models import MODELS
from tests.gpu_proof.fake_training import (
    FakeRun,
    run_block_training,
    run_module_training,
    run_roll_out_training,
    run_student_training,
    target_size,
)
from workers.distill.dspark.memory import BlockBatch, block_flops, block_memory, block_size
from workers.distill.eagle3.memory import RollOutBatch, head_size, roll_out_flops, roll_out_memory
from workers.distill.memory import TrainingMemory
from workers.distill.modules.memory import (
    ModuleBatch,
    StudentShape,
    TrainedShape,
    module_flops,
    module_memory,
    module_size,
)
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, LayerShape
from workers.model.public_shapes import MaskedBlockShape

pytestmark = pytest.mark.slow

BELOW, ABOVE = 0.97, 1.10
"""The predicted peak as a share of the counted one: bounds."""
CLOSE = 0.95, 1.05
"""Bounds of predicted ÷ counted memory for kinds that one process trains."""
GPU_BYTES = 80e9
ROWS = 100


def shape_for(name: str) -> MaskedBlockShape:
    """The drafter that `pilotfish distill --kind dspark` trains for a target."""
    chosen = dspark.options(["--target", name, "--prompts", "none", "--out", "none"])
    assert isinstance(chosen, argparse.Namespace)
    return dspark.block_shape(MODELS[name], chosen, 3)


def check(planned: TrainingMemory, ran: FakeRun, bounds: tuple[float, float] = (BELOW, ABOVE)) -> None:
    """Check that a step took what is planned for it, and fits a GPU."""
    assert planned.held == pytest.approx(ran.held, rel=1e-3)
    assert bounds[0] < planned.peak / ran.peak < bounds[1]
    assert ran.peak < GPU_BYTES


CONFIGURATIONS = pytest.mark.parametrize(
    ("name", "ranks", "recomputes"),
    [("Llama-3.1-8B", 1, False), ("Llama-3.1-8B", 1, True), ("Llama-3.3-70B", 8, False)],
    ids=["8B", "8B, recomputed", "70B, one of eight"],
)


@CONFIGURATIONS
def test_the_predicted_memory_is_what_a_step_takes(name: str, ranks: int, recomputes: bool) -> None:
    """The module, its optimizers, the target's ends and 150,000 tokens of texts fit one GPU of 80 GB each."""
    target, shape, batch = target_size(name), shape_for(name), BlockBatch(12, 1536, 224)

    ran = run_block_training(target, shape, batch, ROWS, ranks=ranks, recomputes=recomputes)

    planned = block_memory(target, shape, batch, ROWS * batch.length, ranks=ranks, recomputes=recomputes)
    check(planned, ran)
    assert ran.parameters == block_size(shape).parameters
    if ranks == 1:
        assert block_flops(target, shape, batch, recomputes=recomputes) == pytest.approx(ran.flops, rel=0.03)


@pytest.mark.parametrize("packs", [False, True], ids=["padded", "packed"])
@CONFIGURATIONS
def test_an_eagle3_head_takes_what_is_planned(name: str, ranks: int, recomputes: bool, packs: bool) -> None:
    """The head, its optimizers, the target's ends and 150,000 tokens of texts fit one GPU of 80 GB each."""
    target, tokens = target_size(name), 150_000
    shape = eagle3.shape_of(MODELS[name], (2, 16, 29), is_normed=True)
    batch = RollOutBatch(rows=8, length=1024, depths=5, vocabulary=8192, packs=packs)

    ran = run_roll_out_training(target, shape, batch, tokens, ranks=ranks, recomputes=recomputes)

    check(roll_out_memory(target, shape, batch, tokens, ranks=ranks, recomputes=recomputes), ran)
    assert ran.parameters == head_size(shape, batch.vocabulary).parameters
    if ranks == 1:
        assert roll_out_flops(target, shape, batch, recomputes=recomputes) == pytest.approx(ran.flops, rel=0.03)


@pytest.mark.parametrize("kind", ["heads", "plain heads", "eagle", "block", "plain block", "exit", "layers"])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-3.3-70B"])
def test_what_one_process_trains_takes_what_is_planned(name: str, kind: str) -> None:
    """Beside the whole target, which is there between steps or before them, only the one of 8 B fits a GPU of 80 GB."""
    config, target = MODELS[name], target_size(name)
    layer = LayerShape(
        target.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        config.intermediate_size,
    )  # fmt: skip
    every = ModuleBatch(rows=8, length=512, taps=1, paths=8 * 512, depths=1, vocabulary=8192)
    cases: dict[str, tuple[TrainedShape, ModuleBatch]] = {
        "heads": (HeadsShape(), replace(every, paths=1024, depths=4)),
        "plain heads": (HeadsShape(4, 0, 0), replace(every, paths=1024, depths=4)),
        "eagle": (EagleShape(layer), replace(every, taps=3, depths=3)),
        "block": (BlockShape(layer, 5), replace(every, taps=3, paths=1024, depths=5)),
        "plain block": (BlockShape(layer, 5, 2, 0), replace(every, taps=3, paths=1024, depths=5)),
        "exit": (ExitShape((0, 1), has_norm=True), every),
        "layers": (StudentShape(layer, 3), replace(every, taps=0)),
    }
    shape, batch = cases[kind]

    if isinstance(shape, StudentShape):
        ran = run_student_training(name, shape.layers, batch)
    else:
        ran = run_module_training(target, shape, batch)

    planned = module_memory(target, shape, batch)
    check(planned, ran, CLOSE)
    assert ran.parameters == module_size(target, shape, batch.taps).parameters
    assert module_flops(target, shape, batch) == pytest.approx(ran.flops, rel=0.03)
    assert (planned.most < GPU_BYTES) == (name == "Llama-3.1-8B")
