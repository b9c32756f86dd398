"""Decoder layers of known families, computed with few kernels on a GPU.

A layer launches four products, the attention, one kernel that rotates and stores, one for SiLU · mul, and two that add
to the residual stream and normalize it: the sum after a layer's feed-forward network is normalized in the same launch
for the layer that follows. The modules stay what they are, so hooks on layers see the residual stream, and a layer of
which parts are skipped runs as `transformers` wrote it.

A layer is fused only if its classes are among those that are known line by line, and if it then agrees with the
module's own result on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional

from workers.forward.layer_lists import decoder_layers, decoder_list
from workers.forward.linear import FastLinear, MergedLinear
from workers.forward.projections import HeadNorms, Projections, rms_norm

_FAMILIES = {"Llama": "llama", "Mistral": "mistral", "Qwen2": "qwen2", "Qwen3": "qwen3"}
"""Prefix of the classes of `transformers` by its module: their layers differ in biases and in norms of heads alone."""
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}


class LayerKernels(Protocol):
    """The operations of a layer between its products and its attention. Rows are contiguous, `[rows, dim]`."""

    def normalize(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of each row."""
        ...

    def add_and_normalize(
        self, rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + added`, and the RMSNorm of that."""
        ...

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`silu(gates) * values`, of rows that may lie apart."""
        ...


class ReferenceKernels:
    """The operations in plain PyTorch, which the kernels are compared with."""

    def normalize(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of each row."""
        return rms_norm(rows, weight, epsilon)

    def add_and_normalize(
        self, rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + added`, and the RMSNorm of that."""
        total = rows + added
        return total, rms_norm(total, weight, epsilon)

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`silu(gates) * values`."""
        return functional.silu(gates) * values


class TritonKernels:
    """The operations as Triton kernels, one launch each. Making them raises `ImportError` without `triton`."""

    def __init__(self) -> None:
        from workers.forward.triton import gate, norm

        self._gate, self._norm = gate, norm

    def normalize(self, rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm of each row."""
        return self._norm.normalize(rows, weight, epsilon)

    def add_and_normalize(
        self, rows: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rows + added`, and the RMSNorm of that."""
        return self._norm.add_and_normalize(rows, added, weight, epsilon)

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`silu(gates) * values`."""
        return self._gate.silu_mul(gates, values)


@dataclass(slots=True, eq=False)
class _Ahead:
    """The residual stream after the last layer that ran, already normalized for the module that follows."""

    stream: torch.Tensor | None = None
    norm: nn.Module | None = None
    normalized: torch.Tensor | None = None

    def take(self, stream: torch.Tensor, norm: nn.Module) -> torch.Tensor | None:
        """What `norm` makes of this very tensor, if it is known. It is forgotten in any case."""
        found = self.normalized if self.stream is stream and self.norm is norm else None
        self.stream = self.norm = self.normalized = None
        return found


class FusedLayer:
    """The forward pass of a decoder layer."""

    def __init__(self, layer: nn.Module, following: nn.Module, ahead: _Ahead, kernels: LayerKernels) -> None:
        """`following` is the norm that reads what this layer returns."""
        self._layer, self._following, self._ahead, self._kernels = layer, following, ahead, kernels

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
        first = layer.input_layernorm
        normalized = self._ahead.take(hidden_states, first)
        if normalized is None:
            normalized = self._kernels.normalize(stream, first.weight, first.variance_epsilon)
        stream, normalized = self._add(stream, self._attend(normalized, position_embeddings), _NORMS[1])
        mlp = layer.mlp
        gated = self._kernels.silu_mul(mlp.gate_proj(normalized), mlp.up_proj(normalized))
        following: Any = self._following
        stream, normalized = self._kernels.add_and_normalize(
            stream, mlp.down_proj(gated), following.weight, following.variance_epsilon
        )
        result = stream[None]
        self._ahead.stream, self._ahead.norm, self._ahead.normalized = result, following, normalized
        return result

    def _add(self, stream: torch.Tensor, added: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        norm: Any = getattr(self._layer, name)
        return self._kernels.add_and_normalize(stream, added, norm.weight, norm.variance_epsilon)

    def _attend(self, normalized: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        attention: Any = self._layer.self_attn
        step, layer = attention.paged_attention.step, attention.layer_idx
        fresh = Projections(
            queries=attention.q_proj(normalized),
            keys=attention.k_proj(normalized),
            values=attention.v_proj(normalized),
            cosines=angles[0][0],
            sines=angles[1][0],
            dim=attention.head_dim,
            norms=head_norms(attention),
        )
        queries = step.backend.write_rotated(layer, fresh, step.metadata)
        attended = step.backend.attend(layer, queries, step.metadata, attention.scaling)
        output: torch.Tensor = attention.o_proj(attended.flatten(1))
        return output


class _FollowingNorm:
    """The forward pass of the norm after the last layer."""

    def __init__(self, norm: nn.Module, ahead: _Ahead) -> None:
        self._norm, self._ahead = norm, ahead

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalize `[1, tokens, hidden]`."""
        known = self._ahead.take(hidden_states, self._norm)
        if known is not None:
            return known[None]
        output: torch.Tensor = type(self._norm).forward(self._norm, hidden_states)
        return output


def head_norms(attention: Any) -> HeadNorms | None:
    """The norms of heads of a known attention module, if it has any."""
    if (query_norm := getattr(attention, "q_norm", None)) is None:
        return None
    return HeadNorms(query_norm.weight, attention.k_norm.weight, query_norm.variance_epsilon)


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
    ahead = _Ahead()
    following: list[Any] = [*(layer.input_layernorm for layer in layers[1:]), norm]
    for layer, after in zip(layers, following, strict=True):
        layer.forward = FusedLayer(layer, after, ahead, kernels)
    norm.forward = _FollowingNorm(norm, ahead)
    return True


def undo_fuse(model: nn.Module) -> None:
    """Undo `fuse_layers`."""
    for part in (*decoder_layers(model), getattr(decoder_list(model)[0], "norm", None)):
        if part is not None:
            vars(part).pop("forward", None)


def _is_known(layer: nn.Module, norm: nn.Module) -> bool:
    """Whether a layer computes what `FusedLayer` does."""
    for prefix, family in _FAMILIES.items():
        if type(layer).__name__ != f"{prefix}DecoderLayer" or not _is_of(layer, family):
            continue
        parts = dict(layer.named_children())
        if set(parts) != {"self_attn", "mlp", *_NORMS}:
            return False
        attention, mlp = parts["self_attn"], parts["mlp"]
        names = {name for name, _ in attention.named_children()}
        norms = [norm, *(parts[name] for name in _NORMS), *(getattr(attention, name) for name in names & _HEAD_NORMS)]
        linears = [getattr(attention, name, None) for name in _PROJECTIONS]
        linears += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        return (
            type(attention).__name__ == f"{prefix}Attention"
            and type(mlp).__name__ == f"{prefix}MLP"
            and _is_of(attention, family)
            and _is_of(mlp, family)
            and names in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS)
            and all(_is_rms_norm(one, f"{prefix}RMSNorm", family) for one in norms)
            and all(isinstance(one, FastLinear | MergedLinear) for one in linears)
            and _is_silu(mlp.act_fn)
            and not any(_has_hooks(one) for one in (layer, attention, mlp, *norms))
        )
    return False


def _is_of(module: nn.Module, family: str) -> bool:
    return type(module).__module__ == f"transformers.models.{family}.modeling_{family}"


def _is_rms_norm(norm: nn.Module, name: str, family: str) -> bool:
    """Whether a norm has one weight that each rank holds whole."""
    from torch.distributed.tensor import DTensor  # takes most of a second

    return type(norm).__name__ == name and _is_of(norm, family) and not isinstance(norm.weight, DTensor)


def _is_silu(function: object) -> bool:
    return isinstance(function, nn.SiLU) or type(function).__name__ == "SiLUActivation"


def _has_hooks(module: nn.Module) -> bool:
    """Whether something else changes what the module does."""
    return bool("forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks)
