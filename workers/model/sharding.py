"""How the ranks of a tensor-parallel group divide a decoder: heads, columns of feed-forward networks, vocabulary.

`transformers` divides the layers of most families by a plan of its own. This module has what it does not do: KV heads
that several ranks share, with query heads that these do not divide evenly, and families whose attention has no plan
that divides it. Everything here depends on the configuration, the rank and the number of ranks alone, so that no rank
decides by itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cluster.core.errors import ConfigurationError
from workers.forward.adapters.base import OWN_HEADS
from workers.forward.layer_lists import plan_name
from workers.forward.weights.choice import store
from workers.forward.weights.modules import StoredLinear
from workers.model.head_counts import kv_heads_of, ranks_that_divide
from workers.model.plan_styles import HEAD_INPUTS, KV_HEADS, OWN_EXPERTS, QUERY_HEADS, WHOLE_EXPERTS, register_styles
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
    "hunyuan_v1_dense": _ATTENTION | _divided("mlp", ("gate_proj", "up_proj"), "down_proj"),
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
_OF_HEADS = dict.fromkeys(("k_proj", "v_proj"), ("colwise", KV_HEADS))
_OF_HEADS |= dict.fromkeys(("q_proj", "g_proj", "gate_proj", "gate_bias", "sinks"), ("colwise", QUERY_HEADS))
_OF_HEADS |= dict.fromkeys(("o_proj", "out_proj", "dense"), ("rowwise", HEAD_INPUTS))
"""Parts of an attention that has a `q_proj`: how a plan divides them evenly, and the style that divides them by
heads."""
_OF_NETWORKS = dict.fromkeys(("up_proj", "down_proj"))
"""Parts of a feed-forward network, to which a plan may give the name of an attention, as that of Nemotron-H does."""


class _Cut(Enum):
    """How a layer is divided."""

    COLUMNS = auto()
    """Outputs in as many parts as there are ranks; the last may be smaller."""
    HEADS = auto()
    """Outputs are query heads, then KV heads of keys, then those of values: each of the three is divided."""
    GROUPS = auto()
    """Outputs are, for each KV head, the query heads that share it, its keys, and its values."""
    QUARTERS = auto()
    """Outputs are four times as many query heads, the values of these, and their keys; of a rank's heads, too."""
    GATE_AND_COLUMNS = auto()
    """Outputs are gates, then as many columns: both are divided."""
    INPUTS = auto()
    """Inputs in parts like those of the layers before; the ranks' products are summed."""


_QUARTERS = 4


def _fused(attention: str, cut: _Cut, network: str) -> dict[str, _Cut]:
    """Four layers: a fused projection, the one after attention, and those of a feed-forward network."""
    (first, second), (third, fourth) = attention.split(), network.split()
    return {first: cut, second: _Cut.INPUTS, third: _Cut.COLUMNS, fourth: _Cut.INPUTS}


def _separate(attention: str, network: str) -> dict[str, _Cut]:
    """The layers of an attention with a projection each for queries, keys and values, and of its network."""
    queries = {f"{attention}.{name}": _Cut.COLUMNS for name in _QUERIES}
    return queries | _fused(f"{attention}.q_proj {attention}.out_proj", _Cut.COLUMNS, network)


_GPT = _fused("attn.c_attn attn.c_proj", _Cut.HEADS, "mlp.c_fc mlp.c_proj")
_OPT = _separate("self_attn", "fc1 fc2")
_WIDENED = "mlp.dense_h_to_4h mlp.dense_4h_to_h"
_BLOOM = _fused("self_attention.query_key_value self_attention.dense", _Cut.GROUPS, _WIDENED)
_PLANS = {
    "biogpt": _OPT,
    "bloom": _BLOOM,
    "codegen": _fused("attn.qkv_proj attn.out_proj", _Cut.QUARTERS, "mlp.fc_in mlp.fc_out"),
    "falcon": _BLOOM,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT | {"attn.c_attn": _Cut.GROUPS},
    "gpt_neo": _separate("attn.attention", "mlp.c_fc mlp.c_proj"),
    "gpt_neox_japanese": _fused("attention.query_key_value attention.dense", _Cut.GROUPS, _WIDENED),
    "gptj": _separate("attn", "mlp.fc_in mlp.fc_out"),
    "mpt": _fused("attn.Wqkv attn.out_proj", _Cut.HEADS, "ffn.up_proj ffn.down_proj"),
    "openai-gpt": _GPT,
    "opt": _OPT,
    "persimmon": _fused("self_attn.query_key_value self_attn.dense", _Cut.GROUPS, _WIDENED),
    "xglm": _OPT,
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
    return heads, kv_heads_of(lambda name: getattr(text, name, None), heads)


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
    fitting, why = ranks_that_divide(heads, kv_heads), ""
    if heads % tensor_parallel and (part := _even_part(config)) is not None:
        fitting, why = [one for one in fitting if heads % one == 0], f", and ranks divide {part} evenly or not at all"
    if tensor_parallel not in fitting:
        raise ConfigurationError(
            f"target.tensor_parallel: {tensor_parallel} does not divide num_attention_heads = {heads} with "
            f"num_key_value_heads = {kv_heads}{why}; it must be one of {', '.join(map(str, fitting))}"
        )


def _even_part(config: PreTrainedConfig) -> str | None:
    """What ranks divide evenly or not at all of a model's attention; `None` if one may have more heads than another."""
    if config.is_encoder_decoder:
        return "the attention of a model with an encoder"
    if has_own_plan(config):
        return None
    plan = _known_plan(config.get_text_config())
    attentions = _attentions(plan)
    for name, style in plan.items():
        attention, _, part = name.rpartition(".")
        if attention in attentions and style in ("colwise", "rowwise") and part not in _OF_HEADS | _OF_NETWORKS:
            return name
    return None if attentions else f"the attention of model type {config.get_text_config().model_type!r}"


def _attentions(plan: Mapping[str, str]) -> set[str]:
    """The names, in a plan, of attention whose query heads are divided, and the inputs of the layer after it."""
    divided = {name for name, style in plan.items() if style == _OF_HEADS.get(name.rpartition(".")[2], ("",))[0]}
    queries = {name.rpartition(".")[0] for name in divided if name.endswith(".q_proj")}
    outputs = {name.rpartition(".")[0] for name in divided if plan[name] == "rowwise"}
    return queries & outputs


def _known_plan(text: PreTrainedConfig) -> dict[str, str]:
    """The plan of `transformers` with what it lacks; empty if there is none."""
    plan: dict[str, str] = (getattr(text, "base_model_tp_plan", None) or {}) | _ADDED_PLANS.get(text.model_type, {})
    return {name: style for name, style in plan.items() if _WHOLE not in name}


def complete_plan(config: PreTrainedConfig, share: Share) -> None:
    """Give a configuration the plan that `transformers` lacks, and change it where ranks hold whole experts, share a
    KV head, or have different numbers of query heads.

    Raises `ConfigurationError` for whole experts of a model without any.
    """
    text = config.get_text_config()
    plan = _known_plan(text)
    if share.expert_parallel:
        plan |= _whole_experts(config, plan)
    if not plan:
        return
    register_styles()
    heads, kv_heads = head_counts(config)
    uneven = _attentions(plan) if heads % share.ranks and share.ranks % kv_heads == 0 else ()
    for name, style in plan.items():
        attention, _, part = name.rpartition(".")
        even, by_heads = _OF_HEADS.get(part, ("", ""))
        if style == even and (attention in uneven or (by_heads == KV_HEADS and share.ranks > kv_heads)):
            plan[name] = by_heads
    text.base_model_tp_plan = plan  # type: ignore[misc]


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
    return {name: styles[style] for name, style in known.items()}


def keep_own_part(module: PreTrainedModel, share: Share, quantization: str = "none") -> None:
    """Reduce what the plan left whole to this rank's part: heads, norms of heads, and biases.

    The ranks' products of an expert are summed, so the first rank alone adds the bias. What an attention layer itself
    holds, as learned sinks, becomes a usual tensor. The padding row of a divided embedding is that of one rank alone.
    Raises `ConfigurationError` for a layer with other numbers of heads than the configuration says.
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
    counts = head_counts(module.config)
    queries, keys = share.query_heads(*counts), share.kv_heads(counts[1])
    _keep_own_norms(module, {"q_norm": queries, "k_norm": keys})
    check_heads(module, share)
    parts = {KV_HEADS: (counts[1], keys), QUERY_HEADS: (counts[0], queries), HEAD_INPUTS: (counts[0], queries)}
    plan: dict[str, str] = module.tp_plan or {}
    for path, attention in list(module.named_modules()):
        for name in _OF_HEADS:
            style = plan.get(plan_name(f"{path}.{name}"), "")
            if style in parts and (layer := getattr(attention, name, None)) is not None:
                attention.num_key_value_groups = len(_range(queries)) // len(_range(keys))
                heads, own = parts[style]
                if isinstance(layer, nn.Parameter) and len(layer) == heads:  # that of a stored model is reduced already
                    setattr(attention, name, nn.Parameter(layer.detach()[own].clone(), requires_grad=False))
                elif type(layer) is nn.Linear:  # one of a stored model was read in this rank's part
                    count = layer.in_features if style == HEAD_INPUTS else layer.out_features
                    rows = rows_of_heads(count, heads, own, share, f"{path}.{name}")
                    setattr(attention, name, _of_own_heads(layer, style, rows, quantization))


def _of_own_heads(layer: nn.Linear, style: str, own: slice, quantization: str) -> nn.Module:
    """A layer of an attention, reduced to its `own` outputs, or inputs."""
    if style == HEAD_INPUTS:
        weight = layer.weight.detach()[:, own].contiguous()
        bias = None if layer.bias is None else layer.bias.detach()
        return StoredLinear(store(weight, quantization, cut_inputs=True), bias, sums_ranks=True)
    keep_outputs(layer, own)
    return layer


def check_heads(module: PreTrainedModel, share: Share) -> None:
    """Raise `ConfigurationError` for whole layers with other numbers of heads than the configuration says, where ranks
    have different numbers of them: nothing else would tell where a head begins.
    """
    (heads, kv_heads), plan = head_counts(module.config), module.tp_plan or {}
    for path, attention in module.named_modules():
        queries = getattr(attention, "q_proj", None)
        if plan.get(plan_name(f"{path}.q_proj")) != QUERY_HEADS or type(queries) is not nn.Linear:
            continue
        known = {name: one for name in _OF_HEADS if isinstance(one := getattr(attention, name, None), nn.Linear)}
        output = next(one for name, one in known.items() if _OF_HEADS[name][1] == HEAD_INPUTS)
        stored: Any = known.get("v_proj") or known.get("k_proj")  # neither reads those of another layer
        width = output.in_features // heads if stored is None else stored.out_features // kv_heads
        if (output.in_features, getattr(attention, "head_dim", width)) != (heads * width, width):
            raise ConfigurationError(
                f"target.tensor_parallel: {share.ranks} is refused: {path} has another number of heads than "
                f"num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; it must divide all these numbers"
            )


def _keep_own_norms(module: PreTrainedModel, own: Mapping[str, slice]) -> None:
    """Reduce norms that have weights `[heads, dim]`, as Cohere's, to those of this rank's heads, by their names."""
    for attention in module.modules():
        for name, heads in own.items():
            norm: Any = getattr(attention, name, None)
            weight = getattr(norm, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                norm.weight = nn.Parameter(weight.detach()[heads].clone(), requires_grad=False)


def _zeroes_padding(module: PreTrainedModel) -> bool:
    """Whether the family's code zeroes the padding row of an embedding that was read. Of a shard it zeroes a copy."""
    tried = nn.Embedding(1, 1, padding_idx=0)
    nn.init.ones_(tried.weight)
    tried.weight._is_hf_initialized = True  # type: ignore[attr-defined]
    module._init_weights(tried)
    return not bool(tried.weight.any())


def rows_of_heads(count: int, heads: int, own: slice, share: Share, what: str) -> slice:
    """Keep the outputs or inputs of a layer that belong to some of its heads. Raises `ConfigurationError`."""
    if count % heads:
        raise ConfigurationError(
            f"target.tensor_parallel: {share.ranks} is refused: {what} has {count} outputs or inputs, which are no "
            f"{heads} heads; it must be 1"
        )
    size = count // heads
    return slice(own.start * size, own.stop * size)


def divide(module: PreTrainedModel, share: Share, quantization: str, device: torch.device) -> None:
    """Keep this rank's part of a model that was read whole, and move it to its device. See `has_own_plan`.

    Raises `ConfigurationError` for sizes that the ranks do not divide.
    """
    config = module.config.get_text_config()
    plan, counts = _PLANS[config.model_type], head_counts(module.config)
    for path, layer in list(module.named_modules()):
        place = _place(path)
        cut = plan.get(place)
        if cut is None:
            continue
        if cut is not _Cut.INPUTS:
            keep_outputs(layer, _own_outputs(cut, _matrix(layer).shape[0], counts, share, path))
            continue
        weight, (parent, _, name) = _matrix(layer), path.rpartition(".")
        count, is_attention = weight.shape[1], "att" in place
        own = share.tokens(count)
        if is_attention:
            own = rows_of_heads(count, counts[0], share.query_heads(*counts), share, path)
        bias = getattr(layer, "bias", None)
        bias = None if bias is None else bias.detach().to(device)
        cut_weight = weight[:, own].contiguous().to(device)
        summed = StoredLinear(store(cut_weight, quantization, cut_inputs=True), bias, sums_ranks=True)
        setattr(module.get_submodule(parent), name, summed)
        if is_attention:
            _count_own_heads(module.get_submodule(parent), counts, share, count // counts[0])
    head: Any = module.get_output_embeddings()
    keep_outputs(head, share.tokens(head.out_features))
    module.to(device)  # type: ignore[arg-type]  # of `transformers`


class OwnPlan:
    """How `divide` divides a family's layers, for a model whose layers are read in a rank's part."""

    def __init__(self, config: PreTrainedConfig, share: Share) -> None:
        """A family without such a plan has no layers here."""
        self._plan = _PLANS.get(config.get_text_config().model_type, {})
        self._counts, self._share = head_counts(config), share

    def __contains__(self, path: str) -> bool:
        return _place(path) in self._plan

    def style(self, path: str) -> str:
        """The word, in a plan, for a layer that is divided by its inputs."""
        return HEAD_INPUTS if "att" in _place(path) else "rowwise"

    def outputs(self, path: str, outputs: int) -> torch.Tensor | None:
        """Indices of the outputs that the rank keeps of a layer with so many; `None` for one divided by its inputs.

        Raises `ConfigurationError` for a number that the ranks do not divide.
        """
        cut = self._plan[_place(path)]
        return None if cut is _Cut.INPUTS else _own_outputs(cut, outputs, self._counts, self._share, path)

    def count_heads(self, path: str, attention: nn.Module, inputs: int) -> None:
        """Let an attention module expect the rank's heads if its layer at `path`, of so many inputs, reads them all."""
        place = _place(path)
        if self._plan.get(place) is _Cut.INPUTS and "att" in place:
            _count_own_heads(attention, self._counts, self._share, inputs // self._counts[0])


def _place(path: str) -> str:
    """The name of a layer within its decoder layer."""
    return re.sub(r"^.*\.\d+\.", "", path)


def _own_outputs(cut: _Cut, outputs: int, counts: tuple[int, int], share: Share, what: str) -> torch.Tensor:
    """Indices of the outputs that a rank keeps."""
    if cut is _Cut.COLUMNS:
        return _range(share.tokens(outputs))
    if cut is _Cut.GATE_AND_COLUMNS:
        own = _range(share.tokens(outputs // 2))
        return torch.cat((own, own + outputs // 2))
    size = rows_of_heads(outputs, counts[0] + 2 * counts[1], slice(0, 1), share, what).stop
    return torch.cat([_range(slice(one * size, (one + 1) * size)) for one in _own_heads(cut, counts, share)])


def _own_heads(cut: _Cut, counts: tuple[int, int], share: Share) -> list[int]:
    """The heads of a fused projection that a rank keeps, by their places among those of queries, keys and values."""
    (heads, kv_heads), shared = counts, counts[0] // counts[1]
    queries = range(heads)[share.query_heads(heads, kv_heads)]
    keys = range(kv_heads)[share.kv_heads(kv_heads)]
    if cut is _Cut.HEADS:
        return [*queries, *(heads + one for one in keys), *(heads + kv_heads + one for one in keys)]
    if cut is _Cut.GROUPS:
        places: list[int] = []
        for one in keys:
            first = one * (shared + 2)
            places += [first + query % shared for query in queries if query // shared == one]
            places += [first + shared, first + shared + 1]
        return places
    own, each = len(queries) // _QUARTERS, heads // _QUARTERS
    if len(queries) % _QUARTERS:
        raise ConfigurationError(
            f"target.tensor_parallel: {share.ranks} is refused: ranks divide each of four parts of a projection; "
            f"num_attention_heads = {heads} must be a multiple of {_QUARTERS * share.ranks}"
        )
    quarters = [queries[start : start + own] for start in range(0, len(queries), own)]
    return [
        one // each * 3 * each + kind * each + one % each
        for quarter in quarters
        for kind in range(3)
        for one in quarter
    ]


def _count_own_heads(attention: Any, counts: tuple[int, int], share: Share, dim: int) -> None:
    """Let an attention module expect the heads of this rank, whatever it calls their numbers. `dim` is a head's."""
    own = share.query_heads(*counts)
    heads, kv_heads = len(_range(own)), len(_range(share.kv_heads(counts[1])))
    numbers = dict.fromkeys(("num_heads", "num_attention_heads", "n_heads", "n_head"), heads)
    numbers |= dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_heads"), kv_heads)
    numbers |= dict.fromkeys(("split_size", "embed_dim"), heads * dim)
    numbers |= {"num_key_value_groups": heads // kv_heads, "kv_dim": kv_heads * dim}
    for name, number in numbers.items():
        if hasattr(attention, name):
            setattr(attention, name, number)
    setattr(attention, OWN_HEADS, own)
    if hasattr(attention, "config"):
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads = heads


def _matrix(layer: Any) -> torch.Tensor:
    """The weights of a linear layer, `[out, in]`."""
    weight: torch.Tensor = layer.weight.detach()
    return weight.t() if isinstance(layer, Conv1D) else weight


def keep_outputs(layer: Any, outputs: slice | torch.Tensor) -> None:
    """Reduce a linear layer to some of its outputs, and free the others, unless an embedding is tied to it."""
    weight = _matrix(layer)[outputs]
    is_transposed = isinstance(layer, Conv1D)
    layer.weight = _own_parameter(weight.t() if is_transposed else weight)
    setattr(layer, "nf" if is_transposed else "out_features", weight.shape[0])
    if layer.bias is not None:
        layer.bias = _own_parameter(layer.bias.detach()[outputs])


def _own_parameter(part: torch.Tensor) -> nn.Parameter:
    """A copy of a part of a tensor: as long as a view of it is held, so is all of its memory."""
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)


def _range(part: slice) -> torch.Tensor:
    """The indices of a slice."""
    return torch.arange(part.start, part.stop)
