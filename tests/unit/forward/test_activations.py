"""Functions of single numbers on CPU: a row has the same bits beside any others."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import _len_torch_function_stack
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tests.support.models import tiny
from workers.forward.activations import replace_activations

ROWS = 70
HIDDEN = 48


def router() -> DeepseekV3TopkRouter:
    """A router that takes the sigmoid of its logits. Its products are exact, whatever the order of their sums."""
    layer = DeepseekV3TopkRouter(tiny.deepseek_v3(hidden_size=HIDDEN))
    with torch.no_grad():
        layer.weight.normal_(std=2).round_().div_(16)
    return layer.requires_grad_(False)


def test_a_router_weighs_the_experts_of_a_row_alike_beside_any_others() -> None:
    torch.manual_seed(0)
    x, layer = torch.randint(-3, 4, (ROWS, HIDDEN)).float(), router()
    replace_activations(layer)
    every = layer(x)[1]
    for rows in range(1, ROWS):
        assert torch.equal(layer(x[:rows])[1], every[:rows]), rows


def test_functions_outside_of_such_a_module_stay_as_they_are() -> None:
    layer = router()
    replace_activations(layer)
    layer(torch.zeros(1, HIDDEN))
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, HIDDEN + 1))
    assert _len_torch_function_stack() == 0
