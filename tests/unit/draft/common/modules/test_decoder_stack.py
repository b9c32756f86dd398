"""The layers of public drafts are one call of the CPU kernels, and equal those of torch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import public_drafts
from tests.support.models.public_drafts import DFLASH, DFLASH2, DSPARK, LLAMA, Draw, Tensors
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.common.modules.decoder_stack import DecoderStack, is_one_call
from workers.draft.common.modules.module_settings import Weights
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_pass import committed_piece
from workers.forward.native import window_layers
from workers.forward.native.window_layers import WindowPiece
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.model.public_shapes import DecoderShape, FeatureShape, MaskedBlockShape

CPU_CODE = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
EAGLE3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(public_drafts.DRAFTED)}
PEAGLE = EAGLE3 | {
    "architectures": ["PeagleLlamaForCausalLM"],
    "num_hidden_layers": 2,
    "pard_token": public_drafts.MASK,
}


def scaled(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, **parameters}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CASES: dict[str, tuple[dict[str, Any], Tensors]] = {
    "dflash": (DFLASH, public_drafts.block()),
    "dflash, yarn": (DFLASH | scaled("yarn", original_max_position_embeddings=64), public_drafts.block()),
    "dflash, biases": (DFLASH | {"attention_bias": True}, public_drafts.block(biases="qkvo")),
    "dspark": (DSPARK, public_drafts.spark()),
    "dspark, linear": (DSPARK | scaled("linear"), public_drafts.spark()),
    "eagle 1": (LLAMA | {"model_type": "qwen2"}, public_drafts.eagle1(biases="qkv")),
    "eagle 3": (EAGLE3, public_drafts.eagle3()),
    "eagle 3, llama3": (EAGLE3 | scaled("llama3", **LLAMA3), public_drafts.eagle3()),
    "eagle 3, normalised queries": (
        EAGLE3 | {"model_type": "qwen3", "head_dim": public_drafts.WIDTH},
        public_drafts.eagle3(head_norms=True),
    ),
    "p-eagle": (PEAGLE, public_drafts.peagle("midlayer.")),
}
POSITIONS = (90, 91, 92, 93, 20, 21, 22, 23, 7, 8, 9)
SLOTS = 100


def module_of(directory: Path, config: dict[str, Any], tensors: Tensors) -> PublicModule:
    """A module of a checkpoint's shape, with random weights."""
    shape = read_draft(public_drafts.write(directory, config, tensors)).shape
    assert isinstance(shape, FeatureShape | MaskedBlockShape)
    draw = Draw(3)
    return PublicModule(
        shape,
        {
            name: draw.norm(*size) if "norm.weight" in name else draw.matrix(*size)
            for name, size in shape.tensors().items()
        },
    )


def body_of(module: PublicModule) -> DecoderShape:
    assert isinstance(module.shape, FeatureShape | MaskedBlockShape)
    return module.shape.body


@dataclass(frozen=True)
class Computed:
    """What a pass returns, and the keys and values that it leaves."""

    outputs: Tensor
    windows: list[Tensor]


def computed(stack: DecoderStack, module: PublicModule, only: int | None = None) -> Computed:
    """A pass over three rows, or one of them.

    They are a block whose slots attend to each other and to all context, a block after context with a gap, and tokens
    that attend to those before them.
    """
    body, draw = body_of(module), Draw(4)
    gap = torch.ones(24, dtype=torch.bool)
    gap[3:9] = False
    causal = torch.ones(3, 10, dtype=torch.bool).tril(7)
    pieces = [
        WindowPiece(*(draw.matrix(body.layers, body.kv_heads, SLOTS, body.head_width) for _ in "kv"), *rest)
        for rest in ((90, 4, None), (20, 4, gap), (7, 3, causal))
    ]
    residual, inputs = 3 * draw.matrix(len(POSITIONS), body.hidden_size), None
    if module.tensors["layers.0.self_attn.q_proj.weight"].shape[1] > body.hidden_size:
        inputs = 7 * draw.matrix(len(POSITIONS), 2 * body.hidden_size)
    first = 0 if only is None else sum(piece.count for piece in pieces[:only])
    pieces = pieces if only is None else [pieces[only]]
    part = slice(first, first + sum(piece.count for piece in pieces))
    outputs = stack.run(residual[part], POSITIONS[part], pieces, None if inputs is None else inputs[part])
    return Computed(outputs, [window for piece in pieces for window in (piece.keys, piece.values)])


def stack_of(module: PublicModule, weights: Weights) -> DecoderStack:
    return DecoderStack(module, body_of(module), weights, None)


def assert_equal(mine: Computed, wanted: Computed, tolerance: float) -> None:
    for one, other in zip([mine.outputs, *mine.windows], [wanted.outputs, *wanted.windows], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@CPU_CODE
@pytest.mark.parametrize("name", CASES)
def test_one_call_computes_what_torch_computes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(tmp_path, *CASES[name])
    weights: tuple[tuple[Weights, float], ...] = (("float32", 1e-5), ("bfloat16", 5e-2), ("int8", 1e-2), ("int4", 1e-2))
    for stored, tolerance in weights:
        whole = stack_of(module, stored)
        with monkeypatch.context() as patch:
            patch.setattr(window_layers, "load_library", lambda _: None)
            apart = stack_of(module, stored)

        assert whole.windows is None, "the kernels attend"
        assert apart.windows is not None
        assert_equal(computed(whole, module), computed(apart, module), tolerance)


@CPU_CODE
@pytest.mark.parametrize("name", ["dspark", "eagle 3"])
def test_rows_of_a_call_do_not_change_each_other(name: str, tmp_path: Path) -> None:
    module = module_of(tmp_path, *CASES[name])
    stack = stack_of(module, "bfloat16")

    alone = [computed(stack, module, one) for one in range(3)]

    assert torch.equal(computed(stack, module).outputs, torch.cat([one.outputs for one in alone]))


@CPU_CODE
def test_slots_of_a_block_attend_to_later_ones(tmp_path: Path) -> None:
    """A change of the last slot's input changes the first slot's output."""
    module = module_of(tmp_path, *CASES["dspark"])
    stack, body = stack_of(module, "float32"), body_of(module)
    keys, values = (torch.zeros(body.layers, body.kv_heads, 4, body.head_width) for _ in "kv")
    residual, block = Draw(5).matrix(4, body.hidden_size), WindowPiece(keys, values, 0, 4, None)
    before = stack.run(residual, range(4), [block])

    residual[-1] *= -1.0

    assert (stack.run(residual, range(4), [block])[0] - before[0]).abs().max() > 1e-3


@CPU_CODE
def test_a_head_computes_with_weights_that_replace_its_own(tmp_path: Path) -> None:
    """The head that they are made from goes on with its own."""
    module = module_of(tmp_path, *CASES["eagle 3"])
    replacing = replace(module, tensors={name: one.flip(0) for name, one in module.tensors.items()})
    table = Draw(6).matrix(public_drafts.VOCABULARY, public_drafts.HIDDEN)
    ends = TargetEnds(table, table, torch.ones(public_drafts.HIDDEN), 1e-5, None)
    head = FeaturePass(module, ends, "float32", 8)

    def outputs(of: FeaturePass) -> Tensor:
        window = ContextWindow(of.context_shape, torch.device("cpu"))
        features = Draw(7).matrix(3, public_drafts.HIDDEN)
        return of.run(features, [committed_piece(window, 0, (5, 6, 7), 8)])

    before, other = outputs(head), head.with_weights(replacing)

    assert other.windows is None, "the kernels attend"
    assert torch.equal(outputs(other), outputs(FeaturePass(replacing, ends, "float32", 8)))
    assert not torch.equal(outputs(other), before)
    assert torch.equal(outputs(head), before)


def test_modules_with_convolutions_or_on_another_device_are_not_one_call(tmp_path: Path) -> None:
    for index, (config, tensors) in enumerate(CASES.values()):
        module = module_of(tmp_path / str(index), config, tensors)
        assert is_one_call(module)
        assert not is_one_call(replace(module, tensors={name: one.to("meta") for name, one in module.tensors.items()}))
    convolved = module_of(tmp_path / "convolved", DFLASH2, public_drafts.second())
    assert not is_one_call(convolved)
    assert stack_of(convolved, "float32").windows is not None
