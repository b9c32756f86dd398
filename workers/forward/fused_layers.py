"""Decoder layers of known families, computed with few kernels on a GPU.

A layer launches four products, the attention, and one kernel that rotates and stores. Two of the products add to the
residual stream and normalize it: the sum after a layer's feed-forward network is normalized for the layer that follows.
The last one computes SiLU · mul before it for few rows. Otherwise that is a launch of its own; and so are addition and
norm where ranks sum, for many rows and for quantized matrices. In a mixture the feed-forward network is the router's
product, a kernel that chooses, and the experts. The modules stay what they are, so hooks on layers see the residual
stream, and a layer of which parts are skipped runs as `transformers` wrote it.

A layer is fused only if its classes are among those that are known line by line, and if it then agrees with the
module's own result on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from workers.forward.activations import RowwiseActivation
from workers.forward.expert_choice import ExpertChoice
from workers.forward.experts import stream_experts
from workers.forward.layer_kernels import LayerKernels, StreamProduct
from workers.forward.layer_lists import decoder_layers, decoder_list
from workers.forward.linear import FastLinear, MergedLinear, local_product
from workers.forward.projections import Gated, HeadNorms, Projections
from workers.forward.residual_product import MOST_ROWS


@dataclass(frozen=True, slots=True)
class _Family:
    """What distinguishes the layers of a family from Llama's, biases and norms of heads apart."""

    module: str
    """The name of the family's module in `transformers`."""
    mixture: str = ""
    """Class of the feed-forward network that is a mixture, without the family's prefix."""
    router: str = "gate"
    """Name of the mixture's router."""
    is_gpt_oss: bool = False
    """Norms multiply before they round, and each pair of rotated numbers has one angle."""


_FAMILIES = {
    "Llama": _Family("llama"),
    "Mistral": _Family("mistral"),
    "Qwen2": _Family("qwen2"),
    "Qwen3": _Family("qwen3"),
    "Mixtral": _Family("mixtral", "SparseMoeBlock"),
    "Qwen3Moe": _Family("qwen3_moe", "SparseMoeBlock"),
    "GptOss": _Family("gpt_oss", "MLP", "router", is_gpt_oss=True),
}
"""By the prefix of their classes."""
LEAST_IN_HALVES, _HALF_TILE = 512, 128
"""Fewest rows that ranks multiply and sum in two halves, of which the first is a multiple of the other number. For
fewer, reading the weights twice takes longer than waiting for sums."""
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """The parts of a feed-forward network with experts."""

    router: nn.Module
    experts: nn.Module
    choice: ExpertChoice

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The router's logits of `rows` `[rows, hidden]`, `[rows, experts]`."""
        router: Any = self.router
        return functional.linear(rows, router.weight, getattr(router, "bias", None))


@dataclass(frozen=True, slots=True, eq=False)
class _Norm:
    """A norm, as the kernels take it."""

    module: nn.Module
    weight: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any, family: _Family) -> _Norm:
        """The norm of a module of a known family."""
        weight = module.weight.detach().float() if family.is_gpt_oss else module.weight
        return cls(module, weight, module.variance_epsilon)


class _Output:
    """A product that ends in the residual stream, and what follows it."""

    def __init__(self, layer: nn.Module, kernels: LayerKernels, *, follows_gate: bool = False) -> None:
        """`follows_gate` says that it multiplies what SiLU · mul returns."""
        self._layer, self._kernels = layer, kernels
        self._local = local = local_product(layer)
        plain = None if local is None else local.plain
        self._product = None if plain is None else kernels.product(plain.weight, plain.bias, follows_gate=follows_gate)
        self.sums_ranks = local is not None and local.reduce

    def add_and_normalize(
        self, x: torch.Tensor | Gated, stream: torch.Tensor, norm: _Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream` plus what the layer makes of `x`, and that normalized."""
        if self.sums_ranks:
            return self.begin(x)(stream, norm, None)
        if self._product is not None and len(stream) <= MOST_ROWS:
            return self._product.add_and_normalize(self._factor(x, self._product), stream, (norm.weight, norm.epsilon))
        return self._kernels.add_and_normalize(stream, self._layer(self._joined(x)), norm.weight, norm.epsilon)

    def _factor(self, x: torch.Tensor | Gated, product: StreamProduct) -> torch.Tensor | Gated:
        """What the product multiplies: gates and values if they are few rows."""
        return x if isinstance(x, Gated) and x.tokens <= product.most_gated else self._joined(x)

    def _joined(self, x: torch.Tensor | Gated) -> torch.Tensor:
        return self._kernels.silu_mul(x.gates, x.values) if isinstance(x, Gated) else x

    def begin(self, x: torch.Tensor | Gated) -> _Rest:
        """Multiply, and begin the sum over ranks. Returns the rest of `add_and_normalize`, which waits for the sum."""
        local, own = self._local, self._product
        if local is None:
            raise RuntimeError("a layer whose weights are not this rank's is not summed here")
        part = local.kernel.multiply(self._joined(x)) if own is None else own.multiply(self._factor(x, own))
        wait = self._kernels.begin_sum(part)

        def finish(
            stream: torch.Tensor, norm: _Norm, out: tuple[torch.Tensor, torch.Tensor] | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            wait()
            added = part if local.bias_after is None else part + local.bias_after
            return self._kernels.add_and_normalize(stream, added, norm.weight, norm.epsilon, out)

        return finish


_Rest = Callable[[torch.Tensor, _Norm, tuple[torch.Tensor, torch.Tensor] | None], tuple[torch.Tensor, torch.Tensor]]
"""What follows a product once its sum over ranks has begun, see `_Output.begin`."""


@dataclass(slots=True, eq=False)
class _Pass:
    """What a layer leaves for those that follow it in a pass."""

    stream: torch.Tensor | None = None
    """The residual stream after the last layer that ran."""
    norm: nn.Module | None = None
    normalized: torch.Tensor | None = None
    """The stream, normalized for the module that follows."""
    half: torch.Tensor | None = None
    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    """Cosines and sines of all numbers of a head, made from `half` of the cosines."""

    def take(self, stream: torch.Tensor, norm: nn.Module) -> torch.Tensor | None:
        """What `norm` makes of this very tensor, if it is known. It is forgotten in any case."""
        found = self.normalized if self.stream is stream and self.norm is norm else None
        self.stream = self.norm = self.normalized = None
        return found

    def whole(self, angles: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all numbers of a head, from those of its first half. Made once in a pass."""
        if self.angles is None or self.half is not angles[0]:
            self.half = angles[0]
            self.angles = torch.cat((angles[0], angles[0]), -1), torch.cat((angles[1], angles[1]), -1)
        return self.angles


class FusedLayer:
    """The forward pass of a decoder layer."""

    def __init__(self, layer: Any, following: _Norm, shared: _Pass, kernels: LayerKernels) -> None:
        """`following` is the norm that reads what this layer returns."""
        self._layer, self._following, self._pass, self._kernels = layer, following, shared, kernels
        self._family = family = family_of(layer)
        self._norms = [_Norm.of(getattr(layer, name), family) for name in _NORMS]
        self._mixture = mixture_of(layer)
        self._attention_output = _Output(layer.self_attn.o_proj, kernels)
        self._experts = None if self._mixture is None else stream_experts(self._mixture.experts)
        is_dense = self._mixture is None
        self._network_output = _Output(layer.mlp.down_proj, kernels, follows_gate=True) if is_dense else None

    def __call__(
        self,
        hidden_states: torch.Tensor,  # [1, tokens, hidden]
        *arguments: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,  # [1, tokens, turned] each
        **others: Any,
    ) -> torch.Tensor:
        """Returns the residual stream after the layer, `[1, tokens, hidden]`."""
        layer: Any = self._layer
        paged = layer.self_attn.paged_attention
        if paged.step is None or position_embeddings is None:  # a probe, which reads what the module asks for
            others["position_embeddings"] = position_embeddings
            output: torch.Tensor = type(layer).forward(layer, hidden_states, *arguments, **others)
            return output
        stream = hidden_states[0].contiguous()
        first, second = self._norms
        normalized = self._pass.take(hidden_states, first.module)
        if normalized is None:
            normalized = self._kernels.normalize(stream, first.weight, first.epsilon)
        attended, network = self._attend(normalized, position_embeddings), self._network_output
        if len(stream) >= LEAST_IN_HALVES and network is not None and network.sums_ranks:
            stream, normalized = self._in_halves(attended, stream, network)
        else:
            stream, normalized = self._attention_output.add_and_normalize(attended, stream, second)
            stream, normalized = self._feed_forward(normalized, stream)
        result = stream[None]
        self._pass.stream, self._pass.norm, self._pass.normalized = result, self._following.module, normalized
        return result

    def _in_halves(
        self, attended: torch.Tensor, stream: torch.Tensor, network: _Output
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream after the layer, and that normalized: while the ranks sum one half of the rows, the other's are
        multiplied. Every rank begins its sums in one order."""
        middle = -(-len(stream) // (2 * _HALF_TILE)) * _HALF_TILE
        halves = slice(0, middle), slice(middle, None)
        second = self._norms[1]
        sums, normalized, last_sums, last_normalized = (torch.empty_like(stream) for _ in range(4))
        begun = [self._attention_output.begin(attended[half]) for half in halves]
        ended = []
        for half, rest in zip(halves, begun, strict=True):
            rest(stream[half], second, (sums[half], normalized[half]))
            ended.append(network.begin(self._gated(normalized[half])))
        for half, rest in zip(halves, ended, strict=True):
            rest(sums[half], self._following, (last_sums[half], last_normalized[half]))
        return last_sums, last_normalized

    def _gated(self, normalized: torch.Tensor) -> Gated:
        """Gates and values of a dense feed-forward network."""
        mlp: Any = self._layer.mlp
        return Gated(mlp.gate_proj(normalized), mlp.up_proj(normalized))

    def _feed_forward(self, normalized: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream after the feed-forward network, and that normalized."""
        if self._network_output is not None:
            return self._network_output.add_and_normalize(self._gated(normalized), stream, self._following)
        mixture = cast("Mixture", self._mixture)
        weights, chosen = self._kernels.choose(mixture.logits(normalized), mixture.choice)
        if self._experts is not None:
            norm = self._following.weight, self._following.epsilon
            return self._experts.mix_add_and_normalize(normalized, chosen, weights, stream, norm)
        added = mixture.experts(normalized, chosen, weights)
        return self._kernels.add_and_normalize(stream, added, self._following.weight, self._following.epsilon)

    def _attend(self, normalized: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """What the heads read, `[rows, heads * dim]`."""
        attention: Any = self._layer.self_attn
        step, layer = attention.paged_attention.step, attention.layer_idx
        cosines, sines = self._pass.whole(angles) if self._family.is_gpt_oss else angles
        fresh = Projections(
            queries=attention.q_proj(normalized),
            keys=attention.k_proj(normalized),
            values=attention.v_proj(normalized),
            cosines=cosines[0],
            sines=sines[0],
            dim=attention.head_dim,
            norms=head_norms(attention),
        )
        queries = step.backend.write_rotated(layer, fresh, step.metadata)
        if (sinks := getattr(attention, "sinks", None)) is None:
            attended = step.backend.attend(layer, queries, step.metadata, attention.scaling)
        else:
            attended = step.backend.attend_with_sinks(layer, queries, step.metadata, attention.scaling, sinks)
        heads: torch.Tensor = attended.flatten(1)
        return heads


class _FollowingNorm:
    """The forward pass of the norm after the last layer."""

    def __init__(self, norm: nn.Module, shared: _Pass) -> None:
        self._norm, self._weight, self._pass = norm, norm.weight, shared

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize `[1, tokens, hidden]`."""
        known = self._pass.take(hidden_states, self._norm)
        if known is not None and self._norm.weight is self._weight:  # a partial pass may have another weight
            return known[None]
        output: torch.Tensor = type(self._norm).forward(self._norm, hidden_states)
        return output


def head_norms(attention: Any) -> HeadNorms | None:
    """The norms of heads of a known attention module, if it has any."""
    if (query_norm := getattr(attention, "q_norm", None)) is None:
        return None
    return HeadNorms(query_norm.weight, attention.k_norm.weight, query_norm.variance_epsilon)


def mixture_of(layer: Any) -> Mixture | None:
    """The mixture of a known layer; `None` if its feed-forward network is none."""
    family = family_of(layer)
    if not family.mixture or not hasattr(layer.mlp, "experts"):
        return None
    router = getattr(layer.mlp, family.router)
    is_of_all = not getattr(router, "norm_topk_prob", True)
    choice = ExpertChoice(router.top_k, is_of_all, is_wide=family.module == "mixtral")
    return Mixture(router, layer.mlp.experts, choice)


def family_of(layer: nn.Module) -> _Family:
    """The family of a known layer."""
    return _FAMILIES[type(layer).__name__.removesuffix("DecoderLayer")]


def has_known_layers(model: nn.Module) -> bool:
    """Whether all decoder layers, whose linear layers have been replaced, are of known classes."""
    layers = list(decoder_layers(model))
    norm = getattr(decoder_list(model)[0], "norm", None) if layers else None
    return norm is not None and all(_is_known(layer, norm) for layer in layers)


def fuse_layers(model: nn.Module, kernels: LayerKernels) -> bool:
    """Fuse the decoder layers. Returns whether their classes are known."""
    if not has_known_layers(model):
        return False
    layers, norm = list(decoder_layers(model)), cast("nn.Module", decoder_list(model)[0].norm)
    shared, family = _Pass(), family_of(layers[0])
    following: list[Any] = [*(layer.input_layernorm for layer in layers[1:]), norm]
    for layer, after in zip(layers, following, strict=True):
        layer.forward = FusedLayer(layer, _Norm.of(after, family), shared, kernels)
    norm.forward = _FollowingNorm(norm, shared)
    return True


def undo_fuse(model: nn.Module) -> None:
    """Undo `fuse_layers`."""
    for part in (*decoder_layers(model), getattr(decoder_list(model)[0], "norm", None)):
        if part is not None:
            vars(part).pop("forward", None)


def _is_known(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether a layer computes what `FusedLayer` does."""
    prefix = type(layer).__name__.removesuffix("DecoderLayer")
    family, parts = _FAMILIES.get(prefix), dict(layer.named_children())
    if family is None or set(parts) != {"self_attn", "mlp", *_NORMS}:
        return False
    attention, mlp = parts["self_attn"], parts["mlp"]
    names = {name for name, _ in attention.named_children()}
    norms = [norm, *(parts[name] for name in _NORMS), *(getattr(attention, name) for name in names & _HEAD_NORMS)]
    linears = [getattr(attention, name, None) for name in _PROJECTIONS]
    return (
        all(_is_of(part, family) for part in (layer, attention, mlp, *norms))
        and type(attention).__name__ == f"{prefix}Attention"
        and names in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS)
        and all(type(one).__name__ == f"{prefix}RMSNorm" and _is_whole(one) for one in norms)
        and all(isinstance(one, FastLinear | MergedLinear) for one in linears)
        and set(attention._parameters) <= {"sinks"}
        and _is_whole(attention)
        and not any(_has_hooks(one) for one in (layer, attention, mlp, *norms))
        and (_is_mixture(mlp, prefix, family) if hasattr(mlp, "experts") else _is_dense(mlp, prefix))
    )


def _is_dense(mlp: Any, prefix: str) -> bool:
    """Whether this is the usual feed-forward network."""
    linears = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    is_known = type(mlp).__name__ == f"{prefix}MLP" and all(
        isinstance(one, FastLinear | MergedLinear) for one in linears
    )
    return is_known and _is_silu(mlp.act_fn)


def _is_mixture(mlp: Any, prefix: str, family: _Family) -> bool:
    """Whether this is a known router before experts, and nothing else."""
    router: Any = getattr(mlp, family.router, None)
    return (
        type(mlp).__name__ == f"{prefix}{family.mixture}"
        and type(router).__name__ == f"{prefix}TopKRouter"
        and {name for name, _ in mlp.named_children()} == {family.router, "experts"}
        and _is_whole(router)
        and not any(_has_hooks(one) for one in (router, mlp.experts))
    )


def _is_of(module: nn.Module, family: _Family) -> bool:
    return type(module).__module__ == f"transformers.models.{family.module}.modeling_{family.module}"


def _is_whole(module: nn.Module) -> bool:
    """Whether each rank holds a module's own parameters whole."""
    from torch.distributed.tensor import DTensor  # takes most of a second

    return not any(isinstance(one, DTensor) for one in module._parameters.values())


def _is_silu(function: object) -> bool:
    function = function.function if isinstance(function, RowwiseActivation) else function
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"


def _has_hooks(module: nn.Module) -> bool:
    """Whether something else changes what the module does."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)
