"""What the ranks hold of attention is the whole together, where one of them has more query heads than another."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Olmo2Config, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cluster.core.errors import ConfigurationError
from tests.support.models import tiny
from tests.zoo.configs import tiny_config
from workers.forward.weights.modules import StoredLinear
from workers.model.sharding import check_divisible, complete_plan, divide, keep_outputs, keep_own_part
from workers.model.share import Share

SEVEN: dict[str, Any] = {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112}
"""Seven query heads read each KV head, as in Qwen2.5-7B."""
RANKS = 4
HEADS = ([0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13])
"""The query heads of each rank."""


def drawn(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with random weights, biases and sinks."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def ranks_of(config: PreTrainedConfig) -> tuple[Any, list[Any]]:
    """The attention of the first layer of a whole model, and of the model of each rank."""
    state, parts = drawn(config).state_dict(), []
    for rank in range(RANKS):
        own = deepcopy(config)
        complete_plan(own, Share(rank, RANKS))
        model = AutoModelForCausalLM.from_config(own, dtype=torch.float32)
        model.load_state_dict(state)
        keep_own_part(model, Share(rank, RANKS))
        parts.append(model.model.layers[0].self_attn)
    return drawn(config).model.layers[0].self_attn, parts


@pytest.mark.parametrize("outputs", [slice(2, 4), torch.tensor([1, 5])], ids=["neighbours", "others"])
@pytest.mark.parametrize("layer", [nn.Linear(3, 8), Conv1D(8, 3)], ids=lambda layer: type(layer).__name__)
def test_what_is_kept_of_a_layer_takes_no_memory_of_the_others(
    layer: nn.Linear | Conv1D, outputs: slice | torch.Tensor
) -> None:
    whole, own = layer(torch.eye(3))[:, outputs], deepcopy(layer)
    keep_outputs(own, outputs)
    assert torch.equal(own(torch.eye(3)), whole)
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in own.parameters())


@pytest.mark.parametrize("make", [tiny.qwen2, tiny.qwen3, tiny.gpt_oss])
def test_the_parts_of_separate_projections_are_the_whole(make: Callable[..., PreTrainedConfig]) -> None:
    whole, parts = ranks_of(make(**SEVEN))
    dim = whole.head_dim
    assert [part.q_proj.weight.shape[0] // dim for part in parts] == [len(own) for own in HEADS]
    assert [part.num_key_value_groups for part in parts] == [len(own) for own in HEADS]
    assert torch.equal(torch.cat([part.q_proj.weight for part in parts]), whole.q_proj.weight)
    if whole.q_proj.bias is not None:
        assert torch.equal(torch.cat([part.q_proj.bias for part in parts]), whole.q_proj.bias)
    if hasattr(whole, "sinks"):
        assert torch.equal(torch.cat([part.sinks for part in parts]), whole.sinks)
    for name in ("k_proj", "v_proj"):
        for rank, part in enumerate(parts):
            head = whole.get_submodule(name).weight[rank // 2 * dim : (rank // 2 + 1) * dim]
            assert torch.equal(part.get_submodule(name).weight, head)
    outputs = [part.o_proj for part in parts]
    assert all(isinstance(one, StoredLinear) and one.sums_ranks for one in outputs)
    assert torch.equal(torch.cat([one.storage.dequantized() for one in outputs], dim=1), whole.o_proj.weight)
    assert all((one.bias is None) is (whole.o_proj.bias is None) for one in outputs)


@pytest.mark.parametrize("counts", [{}, {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40}])
def test_the_parts_of_fused_projections_are_the_whole(counts: dict[str, int]) -> None:
    """Phi-3: all queries, then all keys, then all values."""
    config = tiny.phi3(**(SEVEN | counts))
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, 8
    whole: Any = drawn(config)
    queries, *stored = whole.model.layers[0].self_attn.qkv_proj.weight.split([heads * dim] + 2 * [kv_heads * dim])
    own_queries, own_inputs = [], []
    for rank in range(RANKS):
        own, share = deepcopy(whole), Share(rank, RANKS)
        divide(own, share, "none", torch.device("cpu"))
        attention = own.model.layers[0].self_attn
        count = len(range(heads)[share.query_heads(heads, kv_heads)])
        parts = attention.qkv_proj.weight.split([count * dim, dim, dim])
        own_queries.append(parts[0])
        own_inputs.append(attention.o_proj.storage.dequantized())
        for found, all_heads in zip(parts[1:], stored, strict=True):
            assert torch.equal(found, all_heads.split(dim)[rank * kv_heads // RANKS])
        assert attention.num_key_value_groups == count
    assert torch.equal(torch.cat(own_queries), queries)
    assert torch.equal(torch.cat(own_inputs, dim=1), whole.model.layers[0].self_attn.o_proj.weight)


def test_ranks_that_are_no_multiple_of_the_kv_heads_are_refused_with_those_that_are() -> None:
    refused = r"3 does not divide num_attention_heads = 14 with num_key_value_heads = 2; it must be one of 1, 2, 4, 6, "
    with pytest.raises(ConfigurationError, match=refused):
        check_divisible(tiny.qwen2(**SEVEN), 3)


def test_families_whose_attention_is_divided_evenly_alone_are_refused_by_name() -> None:
    refused = r"4 does not divide .* = 2, and ranks divide the attention of model type 'olmo2' evenly or not at all; "
    with pytest.raises(ConfigurationError, match=refused + "it must be one of 1, 2, 14$"):
        check_divisible(Olmo2Config(**SEVEN), RANKS)
    doge = tiny_config("doge")
    for name, value in SEVEN.items():
        setattr(doge, name, value)
    with pytest.raises(ConfigurationError, match=r"ranks divide layers\.\*\.self_attn\.dt_proj evenly or not at all"):
        check_divisible(doge, RANKS)


def test_a_layer_whose_outputs_are_no_heads_is_refused_by_its_name() -> None:
    config = tiny.qwen2(**(SEVEN | {"num_attention_heads": 8, "hidden_size": 64}))
    complete_plan(config, Share(0, RANKS))
    model: Any = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].self_attn.v_proj.out_features = 17
    refused = r"4 is refused: model\.layers\.1\.self_attn\.v_proj has 17 outputs .* no 2 heads; it must be 1"
    with pytest.raises(ConfigurationError, match=refused):
        keep_own_part(model, Share(0, RANKS))


def test_layers_with_other_numbers_of_heads_than_the_configuration_are_refused() -> None:
    config = tiny.qwen2(**SEVEN)
    complete_plan(config, Share(0, RANKS))
    model: Any = AutoModelForCausalLM.from_config(config)
    model.model.layers[1].self_attn.o_proj.in_features *= 2
    with pytest.raises(
        ConfigurationError, match=r"4 is refused: model\.layers\.1\.self_attn has another number of heads"
    ):
        keep_own_part(model, Share(0, RANKS))
