"""The experts of a layer are replaced by kernels that agree with it, and by no others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config.model_section import ModelSection
from tests.support.models import tiny
from workers.forward.expert_trial import Make, replace_experts_if_equal, replace_experts_on_gpu
from workers.forward.experts import ExpertsKernel, FastExperts, matrices_of
from workers.forward.loaded_model import LoadedModel
from workers.forward.weights.experts import Expert, PlainExperts, gate_of, swiglu
from workers.model.loading import load_model


def loaded(directory: Path) -> LoadedModel:
    """A mixture of two layers, whose experts are as `transformers` has them."""
    path = str(tiny.save(directory, tiny.qwen3_moe()))
    model = load_model(ModelSection(path=path, native="off", compile="off"))
    return replace(model, module=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


def plain(layer: Any) -> ExpertsKernel:
    return PlainExperts(stored(layer), gate_of(layer))


def wrong(layer: Any) -> ExpertsKernel:
    return PlainExperts(stored(layer), lambda product: 1.1 * swiglu(product))


def not_compiled(layer: Any) -> ExpertsKernel:
    raise RuntimeError(f"no kernel for {layer}")


def stored(layer: Any) -> list[Expert]:
    matrices = matrices_of(layer)
    assert matrices is not None
    return matrices.stored("none")


def replaced(model: LoadedModel) -> int:
    return sum(isinstance(part, FastExperts) for part in model.module.modules())


@torch.inference_mode()
def test_experts_that_agree_are_replaced(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    tokens = torch.arange(9)[None]
    expected = model.module(tokens).logits
    assert replace_experts_if_equal(model, plain) == (2, None)
    assert replaced(model) == 2
    torch.testing.assert_close(model.module(tokens).logits, expected)
    assert replace_experts_if_equal(model, plain) == (0, None)  # none are left


@pytest.mark.parametrize(("make", "reason"), [(wrong, "differ by"), (not_compiled, "no kernel for")])
def test_others_stay_as_they_are(tmp_path: Path, make: Make, reason: str) -> None:
    model = loaded(tmp_path)
    count, problem = replace_experts_if_equal(model, make)
    assert count == replaced(model) == 0
    assert reason in (problem or "")


def test_experts_on_a_cpu_are_not_tried(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    replace_experts_on_gpu(model)
    assert replaced(model) == 0
