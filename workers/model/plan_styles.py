"""The words that Pilotfish adds to the plans by which `transformers` divides a model between ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from workers.forward.experts import FIRST_EXPERT
from workers.model.share import Share
from workers.ranks import sum_over_ranks

KV_HEADS = "kv_heads"
"""The style of a projection to KV heads that several ranks share: each rank holds one head."""
QUERY_HEADS = "query_heads"
"""The style of what has outputs, or numbers, of each query head, where some ranks have one head more than others."""
HEAD_INPUTS = "head_inputs"
"""The style of the layer after attention, which has inputs of each query head: the ranks' products are summed."""
WHOLE_EXPERTS = "whole_experts"
"""The style of experts' parameters `[experts, …]` of which each rank holds those of its own experts.

All ranks route alike; a rank computes its own experts for all tokens, and the sum of all ranks is the output."""
OWN_EXPERTS = "own_experts"
"""The style of a layer of such experts."""


class _WholeExperts(TensorParallelLayer):
    """Divides a parameter by experts. Raises `ConfigurationError` if the ranks do not divide their number."""

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        whole = module._parameters.get(param)
        if whole is None:
            return
        own = Share(mesh.get_local_rank(), mesh.size()).experts(len(whole))
        setattr(module, FIRST_EXPERT, own.start)
        module.all_experts, module.num_experts = len(whole), own.stop - own.start
        module._is_expert_parallel = True
        divided = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(divided, requires_grad=whole.requires_grad)


class _OwnExperts(TensorParallelLayer):
    """Computes this rank's experts. A choice of another rank's expert is the number after the last, with weight 0."""

    def should_use_local_tensors(self, module: Any) -> bool:  # noqa: ARG002 - of the base class
        return True

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> tuple[Any, Any]:  # noqa: ARG002
        x, chosen, weights = args
        local = chosen - getattr(module, FIRST_EXPERT)
        is_other = (local < 0) | (local >= module.num_experts)
        return (x, local.masked_fill(is_other, module.num_experts), weights.masked_fill(is_other, 0.0)), kwargs

    def transform_output_post_forward(self, module: Any, output: torch.Tensor, mesh: Any) -> torch.Tensor:  # noqa: ARG002
        output = output.contiguous()
        sum_over_ranks(output)
        return output


def register_styles() -> None:
    """Let `transformers` know these words. What those of heads leave whole, `keep_own_part` reduces."""
    known = dict.fromkeys((KV_HEADS, QUERY_HEADS, HEAD_INPUTS), TensorParallelLayer())
    known |= {WHOLE_EXPERTS: _WholeExperts(), OWN_EXPERTS: _OwnExperts()}
    for style, layer in known.items():
        ALL_PARALLEL_STYLES.register(style, layer)  # type: ignore[arg-type]
