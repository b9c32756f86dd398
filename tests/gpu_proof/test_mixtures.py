"""Whole layers of mixtures by the kernels, interpreted or on a GPU: each agrees with its module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from cluster.core.config.model_section import ModelSection
from tests.gpu_proof.device import DEVICE, needs_kernels
from tests.support.models import tiny
from workers.forward.attention import ATTENTION_NAME, bind
from workers.forward.expert_trial import replace_experts_if_equal, triton_experts
from workers.forward.fused_trial import fuse_if_equal
from workers.forward.layer_kernels import TritonKernels
from workers.forward.replace_linear import replace_linear_layers
from workers.model.loading import load_model

pytestmark = needs_kernels()


@pytest.mark.parametrize(("make", "experts"), [
    (tiny.qwen3_moe, "num_experts"), (tiny.mixtral, "num_local_experts"), (tiny.gpt_oss, "num_local_experts"),
])  # fmt: skip
def test_the_layers_of_mixtures_are_fused(tmp_path: Path, make: Callable[..., PreTrainedConfig], experts: str) -> None:
    path = str(tiny.save(tmp_path, make(num_hidden_layers=1, **{experts: 4})))
    model = load_model(ModelSection(path=path, device=DEVICE.type, native="off", compile="off"))
    module = AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    model = replace(model, module=module.to(DEVICE).eval())
    bind(model.module)
    assert replace_experts_if_equal(model, triton_experts) == (1, None)
    replace_linear_layers(model.module)
    assert fuse_if_equal(model, TritonKernels) is None
