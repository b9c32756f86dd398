"""How the ranks of a tensor-parallel group divide a decoder: heads, columns of feed-forward networks, vocabulary.

`transformers` divides the layers of most families by a plan of its own. This module has what it does not do: KV heads
that several ranks share, and families whose attention has no plan that divides it. Everything here depends on the
configuration, the rank and the number of ranks alone, so that no rank decides by itself.
"""

from __future__ import annotations

import copy
import re
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer
from transformers.pytorch_utils import Conv1D

from cluster.core.errors import ConfigurationError
from workers.forward.layer_lists import plan_name
from workers.forward.weights.choice import store
from workers.forward.weights.modules import StoredLinear
from workers.model.expert_styles import OWN_EXPERTS, WHOLE_EXPERTS, register_expert_styles
from workers.model.head_counts import ranks_that_divide
from workers.model.share import Share


def _divided(part: str, columns: tuple[str, ...], rows: str) -> dict[str, str]:
    """The plan of linear layers in `part` of each layer: outputs of the first are divided, and inputs of the last."""
    plan = dict.fromkeys((f"layers.*.{part}.{name}" for name in columns), "colwise")
    return plan | {f"layers.*.{part}.{rows}": "rowwise"}


_QUERIES = ("q_proj", "k_proj", "v_proj")
_ATTENTION = _divided("self_attn", _QUERIES, "o_proj")
_NETWORK = _divided("feed_forward", ("gate_proj", "up_proj"), "down_proj")
_SHORT_NAMES = _divided("feed_forward", ("w1", "w3"), "w2")
_ADDED_PLANS: dict[str, dict[str, str]] = {
    "bamba": _ATTENTION | _NETWORK,
    "falcon_h1": _ATTENTION | _NETWORK,
    "gpt_oss": _ATTENTION
    | {
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn": "local_params",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
        "layers.*.mlp.experts": "moe_tp_experts",
    },
    "granitemoehybrid": _ATTENTION,
    "jamba": _ATTENTION | _NETWORK,
    "lfm2": _divided("self_attn", _QUERIES, "out_proj") | _SHORT_NAMES,
    "lfm2_moe": _divided("self_attn", _QUERIES, "out_proj") | _SHORT_NAMES,
    "lfm3": _divided("self_attn", (*_QUERIES, "g_proj"), "o_proj") | _SHORT_NAMES,
    "nemotron_h": _divided("mixer", (*_QUERIES, "up_proj"), "o_proj")
    | _divided("mixer.shared_experts", ("up_proj",), "down_proj")
    | {"layers.*.mixer.down_proj": "rowwise"},
}
"""What `transformers` lacks in its plans, in its words, by model type. What no plan names is whole on each rank.

The experts of gpt-oss are stored `[inputs, outputs]`, so what is divided by rows are their outputs, in which gates and
factors alternate."""
_WHOLE = ".linear_attn."
"""In names of layers that are whole on each rank whatever a plan says. Every rank has the states of all recurrent
layers, and computes them from the whole stream: none is summed or gathered."""
KV_HEADS = "kv_heads"
"""The style, in a plan, of a projection to KV heads that several ranks share: each rank holds one head."""
_KV_PROJECTIONS = ("k_proj", "v_proj")


class _Cut(Enum):
    """How a layer is divided."""

    COLUMNS = auto()
    """Outputs in as many parts as there are ranks; the last may be smaller."""
    HEADS = auto()
    """Outputs are query heads, then KV heads of keys, then those of values: each of the three is divided."""
    GATE_AND_COLUMNS = auto()
    """Outputs are gates, then as many columns: both are divided."""
    INPUTS = auto()
    """Inputs in parts like those of the layers before; the ranks' products are summed."""


_PLANS = {
    "gpt2": {
        "attn.c_attn": _Cut.HEADS,
        "attn.c_proj": _Cut.INPUTS,
        "mlp.c_fc": _Cut.COLUMNS,
        "mlp.c_proj": _Cut.INPUTS,
    },
    "opt": {
        "self_attn.q_proj": _Cut.COLUMNS,
        "self_attn.k_proj": _Cut.COLUMNS,
        "self_attn.v_proj": _Cut.COLUMNS,
        "self_attn.out_proj": _Cut.INPUTS,
        "fc1": _Cut.COLUMNS,
        "fc2": _Cut.INPUTS,
    },
    "phi3": {
        "self_attn.qkv_proj": _Cut.HEADS,
        "self_attn.o_proj": _Cut.INPUTS,
        "mlp.gate_up_proj": _Cut.GATE_AND_COLUMNS,
        "mlp.down_proj": _Cut.INPUTS,
    },
}
"""How the layers of families are divided for which `transformers` has no plan that divides attention, by model type and
by the layer's name within its decoder layer. All others of their layers are whole on each rank."""


def has_own_plan(config: PreTrainedConfig) -> bool:
    """Whether `divide` divides models of this family, which are read whole."""
    return config.get_text_config().model_type in _PLANS


def head_counts(config: PreTrainedConfig) -> tuple[int, int]:
    """Query heads and KV heads of the decoder."""
    text = config.get_text_config()
    heads = int(getattr(text, "decoder_attention_heads", None) or text.num_attention_heads)
    return heads, int(getattr(text, "num_key_value_heads", None) or heads)


def check_divisible(config: PreTrainedConfig, tensor_parallel: int) -> None:
    """Raise `ConfigurationError` unless the ranks can divide the heads, and the family has a plan."""
    text = config.get_text_config()
    if not (_known_plan(text) or config.is_encoder_decoder or has_own_plan(config)):
        raise ConfigurationError(
            f"target.tensor_parallel: {tensor_parallel} is refused, because model type {text.model_type!r} "
            "has no tensor-parallel plan; it must be 1"
        )
    if config is not text and getattr(text, "hidden_size_per_layer_input", None):
        raise ConfigurationError(
            f"target.tensor_parallel: {tensor_parallel} is refused, because model type {config.model_type!r} reads the "
            "embedding of one token, which the ranks divide; it must be 1, or the model one of text alone"
        )
    heads, kv_heads = head_counts(config)
    if tensor_parallel not in (fitting := ranks_that_divide(heads, kv_heads)):
        raise ConfigurationError(
            f"target.tensor_parallel: {tensor_parallel} does not divide num_attention_heads = {heads} with "
            f"num_key_value_heads = {kv_heads}; it must be one of {', '.join(map(str, fitting))}"
        )


def _known_plan(text: PreTrainedConfig) -> dict[str, str]:
    """The plan of `transformers` with what it lacks; empty if there is none."""
    plan: dict[str, str] = (getattr(text, "base_model_tp_plan", None) or {}) | _ADDED_PLANS.get(text.model_type, {})
    return {name: style for name, style in plan.items() if _WHOLE not in name}


def complete_plan(config: PreTrainedConfig, share: Share) -> None:
    """Give a configuration the plan that `transformers` lacks, and change it where ranks hold whole experts or share a
    KV head.

    Raises `ConfigurationError` for whole experts of a model without any.
    """
    text = config.get_text_config()
    plan = _known_plan(text)
    if share.expert_parallel:
        plan |= _whole_experts(config, plan)
    if not plan:
        return
    text.base_model_tp_plan = plan  # type: ignore[misc]
    if share.ranks <= head_counts(config)[1]:
        return
    # What this style leaves whole, `keep_own_part` reduces.
    ALL_PARALLEL_STYLES.register(KV_HEADS, TensorParallelLayer())  # type: ignore[arg-type]
    text.base_model_tp_plan = {  # type: ignore[misc]
        name: KV_HEADS if style == "colwise" and name.endswith(_KV_PROJECTIONS) else style
        for name, style in plan.items()
    }


def check_inner(config: PreTrainedConfig, share: Share) -> None:
    """Raise `ConfigurationError` unless the ranks divide the plain experts that `_ADDED_PLANS` divides."""
    text = config.get_text_config()
    if "layers.*.mlp.experts" in _ADDED_PLANS.get(text.model_type, {}) and not share.expert_parallel:
        share.of(text.intermediate_size, "intermediate_size")


def _whole_experts(config: PreTrainedConfig, plan: dict[str, str]) -> dict[str, str]:
    """What a plan says of experts, where each rank holds whole ones. Raises `ConfigurationError` without experts."""
    text = config.get_text_config()
    known = getattr(text, "base_model_ep_plan", None) or {}
    styles = {"grouped_gemm": WHOLE_EXPERTS, "ep_dispatch_experts": OWN_EXPERTS}
    if not known or not styles.keys() >= set(known.values()) or "moe_identity_expert" in plan.values():
        raise ConfigurationError(
            f"target.enable_expert_parallel: true is refused, because model type {text.model_type!r} has no experts "
            "that ranks can hold whole; it must be false"
        )
    register_expert_styles()
    return {name: styles[style] for name, style in known.items()}


def keep_own_part(module: PreTrainedModel, share: Share) -> None:
    """Reduce what the plan left whole to this rank's part: the KV head that it shares with others, and biases.

    The ranks' products of an expert are summed, so the first rank alone adds the bias. What an attention layer itself
    holds, as learned sinks, becomes a usual tensor. The padding row of a divided embedding is that of one rank alone.
    Raises `ConfigurationError` for a layer with another number of KV heads than the configuration says.
    """
    from torch.distributed.tensor import DTensor  # takes most of a second

    for part in module.modules():
        matrix, bias = (getattr(part, name, None) for name in ("down_proj", "down_proj_bias"))
        if share.rank and isinstance(matrix, DTensor) and bias is not None and not isinstance(bias, DTensor):
            bias.zero_()
        if hasattr(part, "layer_idx"):
            for name, parameter in list(part.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    setattr(part, name, nn.Parameter(parameter.to_local().detach(), requires_grad=False))
    embedding: Any = module.get_input_embeddings()
    row = getattr(embedding, "padding_idx", None)
    if row is not None and isinstance(embedding.weight, DTensor) and _zeroes_padding(module):
        own = share.tokens(len(embedding.weight))
        embedding.weight.to_local()[max(row - own.start, 0) : max(row + 1 - own.start, 0)] = 0
    heads, kv_heads = head_counts(module.config)
    plan: dict[str, str] = module.tp_plan or {}
    own = share.kv_heads(kv_heads)
    for path, attention in module.named_modules():
        for name in _KV_PROJECTIONS:
            if plan.get(plan_name(f"{path}.{name}")) != KV_HEADS:
                continue
            attention.num_key_value_groups = heads // share.ranks
            layer: Any = getattr(attention, name)
            if type(layer) is nn.Linear:  # a stored one was read in this rank's part
                keep_outputs(layer, rows_of_heads(layer.out_features, kv_heads, own, f"{path}.{name}"))


def _zeroes_padding(module: PreTrainedModel) -> bool:
    """Whether the family's code zeroes the padding row of an embedding that was read. Of a shard it zeroes a copy."""
    tried = nn.Embedding(1, 1, padding_idx=0)
    nn.init.ones_(tried.weight)
    tried.weight._is_hf_initialized = True  # type: ignore[attr-defined]
    module._init_weights(tried)
    return not bool(tried.weight.any())


def rows_of_heads(outputs: int, heads: int, own: slice, what: str) -> slice:
    """The outputs of some of the heads that a projection computes. Raises `ConfigurationError`."""
    if outputs % heads:
        raise ConfigurationError(f"target.tensor_parallel: {what} has {outputs} outputs, which are no {heads} heads")
    size = outputs // heads
    return slice(own.start * size, own.stop * size)


def divide(module: PreTrainedModel, share: Share, quantization: str, device: torch.device) -> None:
    """Keep this rank's part of a model that was read whole, and move it to its device. See `has_own_plan`.

    Raises `ConfigurationError` for sizes that the ranks do not divide.
    """
    config = module.config.get_text_config()
    plan, counts = _PLANS[config.model_type], head_counts(module.config)
    for path, layer in list(module.named_modules()):
        cut = plan.get(re.sub(r"^.*\.\d+\.", "", path))
        if cut is None:
            continue
        if cut is not _Cut.INPUTS:
            keep_outputs(layer, _own_outputs(cut, layer, counts, share, path))
            continue
        weight = _matrix(layer)
        own = weight[:, share.tokens(weight.shape[1])].contiguous().to(device)
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else bias.detach().to(device)
        summed = StoredLinear(store(own, quantization, cut_inputs=True), bias, sums_ranks=True)
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, summed)
    for attention in module.modules():
        if hasattr(attention, "layer_idx") and hasattr(attention, "head_dim"):
            _count_own_heads(attention, counts, share)
    head: Any = module.get_output_embeddings()
    keep_outputs(head, share.tokens(head.out_features))
    module.to(device)  # type: ignore[arg-type]  # of `transformers`


def _own_outputs(cut: _Cut, layer: nn.Module, counts: tuple[int, int], share: Share, what: str) -> torch.Tensor:
    """Indices of the outputs that a rank keeps."""
    outputs = _matrix(layer).shape[0]
    if cut is _Cut.COLUMNS:
        return _range(share.tokens(outputs))
    if cut is _Cut.GATE_AND_COLUMNS:
        own = _range(share.tokens(outputs // 2))
        return torch.cat((own, own + outputs // 2))
    heads, kv_heads = counts
    size = rows_of_heads(outputs, heads + 2 * kv_heads, slice(0, 1), what).stop
    queries, keys = share.of(heads, "num_attention_heads"), share.kv_heads(kv_heads)
    firsts = (0, heads, heads + kv_heads)
    parts = zip(firsts, (queries, keys, keys), strict=True)
    return torch.cat([_range(slice((first + own.start) * size, (first + own.stop) * size)) for first, own in parts])


def _count_own_heads(attention: Any, counts: tuple[int, int], share: Share) -> None:
    """Let an attention module expect the heads of this rank, whatever it calls their numbers."""
    heads, kv_heads = len(_range(share.of(counts[0], "num_attention_heads"))), len(_range(share.kv_heads(counts[1])))
    numbers = {
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_key_value_groups": heads // kv_heads,
        "split_size": heads * attention.head_dim,
    }
    for name, number in numbers.items():
        if hasattr(attention, name):
            setattr(attention, name, number)
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads = heads


def _matrix(layer: Any) -> torch.Tensor:
    """The weights of a linear layer, `[out, in]`."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight


def keep_outputs(layer: Any, outputs: slice | torch.Tensor) -> None:
    """Reduce a linear layer to some of its outputs. An embedding that is tied to it keeps its weights."""
    weight = _matrix(layer)[outputs]
    is_transposed = isinstance(layer, Conv1D)
    layer.weight = nn.Parameter((weight.t() if is_transposed else weight).contiguous(), requires_grad=False)
    setattr(layer, "nf" if is_transposed else "out_features", weight.shape[0])
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[outputs].contiguous(), requires_grad=False)


def _range(part: slice) -> torch.Tensor:
    """The indices of a slice."""
    return torch.arange(part.start, part.stop)
