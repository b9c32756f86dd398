"""Experts of a mixture for decoding: grouped by expert, so that a step reads the weights of an expert once.

The rows of all sequences that chose an expert are multiplied together. No row's sum depends on the other rows. The
operator `pilotfish::experts` is opaque to the compiler, as products of linear layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from workers.forward.native.build import load_library
from workers.forward.native.packed_experts import PackedExperts
from workers.forward.native.packed_linear import can_pack
from workers.forward.operators import Entries, define
from workers.forward.weights.choice import store
from workers.forward.weights.experts import (
    WHOLE_LAYER,
    Expert,
    Gate,
    PlainExperts,
    RankPart,
    StoredExperts,
    gate_of,
)
from workers.ranks import sum_over_ranks


class ExpertsKernel(Protocol):
    """The experts of a layer in some layout, and the sums of their products."""

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sums of its experts' outputs, `[tokens, hidden]`; on CPU in float32.

        `chosen` and `weights` are `[tokens, experts of a token]`. No token's sum depends on the other tokens.
        """


@runtime_checkable
class StreamExperts(Protocol):
    """Experts whose sums can be added to the residual stream and normalized in the same launch."""

    def mix_add_and_normalize(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        stream: torch.Tensor,
        norm: tuple[torch.Tensor, float],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`stream` `[tokens, hidden]` plus what `mix` returns, and the RMSNorm of that.

        `norm` is the norm's weight and epsilon.
        """


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A kernel, and what it has of the layer's experts."""

    kernel: ExpertsKernel
    part: RankPart


FIRST_EXPERT = "first_expert"
"""Attribute of a layer of `transformers` of which each rank has whole experts: the number of this rank's first one."""
_entries: Entries[_Entry] = Entries()


class FastExperts(nn.Module):
    """Replaces the experts of a layer of `transformers`, or stored ones."""

    def __init__(self, kernel: ExpertsKernel, part: RankPart = WHOLE_LAYER) -> None:
        """`part`: what `kernel` has of the layer's experts."""
        super().__init__()
        self.kernel = kernel
        self.register_buffer("handle", _entries.enter(self, _Entry(kernel, part)), persistent=False)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sum of its experts' outputs, `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`.
        """
        output: torch.Tensor = torch.ops.pilotfish.experts(x, chosen, weights, self.handle)
        return output


def stream_experts(layer: nn.Module) -> StreamExperts | None:
    """The experts of a layer, if they can be added to the residual stream at once: no ranks sum theirs before."""
    if not isinstance(layer, FastExperts) or not isinstance(layer.kernel, StreamExperts):
        return None
    part = _entries[int(cast("torch.Tensor", layer.handle))].part
    return None if part.sums_ranks or part.first_expert else layer.kernel


def is_mixture(layer: nn.Module) -> bool:
    """Whether these are the experts of a layer, stored or in parameters as `transformers` has them."""
    return isinstance(layer, StoredExperts) or hasattr(layer, "is_transposed")


def fast_experts(layer: nn.Module, quantization: str, directory: str | None) -> FastExperts | None:
    """The fastest form of a layer's experts; `None` for those that stay as `transformers` made them.

    These are experts on a GPU (see `workers.forward.expert_trial`), and those whose kind or sharding is not one of the
    usual. `quantization` is the setting. `directory` keeps the compiled CPU kernels.
    """
    if isinstance(layer, StoredExperts):
        if layer.device.type != "cpu":
            return None
        return FastExperts(_on_cpu(layer.experts, layer.gate, directory), layer.part)
    matrices = matrices_of(layer)
    if matrices is None or matrices.first.device.type != "cpu":
        return None
    kernel = _on_cpu(matrices.stored(quantization), gate_of(layer), directory)
    return FastExperts(kernel, matrices.part)


def part_of(layer: Any) -> RankPart:
    """What this rank has of a layer's experts, stored or in parameters as `transformers` has them."""
    matrices = None if isinstance(layer, StoredExperts) else matrices_of(layer)
    return layer.part if isinstance(layer, StoredExperts) else WHOLE_LAYER if matrices is None else matrices.part


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrices:
    """The matrices of all experts of a layer on one rank."""

    first: torch.Tensor
    """`[experts, out, hidden]`."""
    first_biases: torch.Tensor | None
    """`[experts, out]`."""
    second: torch.Tensor
    """`[experts, hidden, inner]`."""
    second_biases: torch.Tensor | None
    """`[experts, hidden]`."""
    part: RankPart = WHOLE_LAYER
    """What these are of the layer's experts."""

    def stored(self, quantization: str) -> list[Expert]:
        """Each expert in the storage of the setting `quantization`."""
        none = [None] * len(self.first)
        first: Any = none if self.first_biases is None else self.first_biases
        second: Any = none if self.second_biases is None else self.second_biases
        return [
            Expert(
                store(self.first[index], quantization),
                one,
                store(self.second[index], quantization, cut_inputs=self.part.is_cut),
                other,
            )
            for index, (one, other) in enumerate(zip(first, second, strict=True))
        ]


def matrices_of(layer: Any) -> ExpertMatrices | None:
    """The matrices of a layer of `transformers`; `None` if its kind or its sharding is not one of the usual."""
    from torch.distributed.tensor import DTensor  # takes most of a second

    def local(value: Any) -> torch.Tensor:
        own: torch.Tensor = (value.to_local() if isinstance(value, DTensor) else value).detach()
        return own

    words = "gate_up_proj" if layer.has_gate else "up_proj", "down_proj"
    own = [getattr(layer, word, None) for word in words]
    if not all(isinstance(one, nn.Parameter) for one in own):
        return None
    is_divided = [isinstance(one, DTensor) for one in own]
    part = RankPart(sums_ranks=any(is_divided))
    if (first := getattr(layer, FIRST_EXPERT, None)) is not None:
        part = RankPart(sums_ranks=True, first_expert=first, all_experts=layer.all_experts)
    is_grouped = layer.config._experts_implementation == "grouped_mm" and hasattr(type(layer).forward, "__wrapped__")
    if not is_grouped or layer.has_post_expert_norm or len(set(is_divided)) > 1:
        return None
    first, second = (local(one).transpose(1, 2) if layer.is_transposed else local(one) for one in own)
    biases = [local(getattr(layer, f"{word}_bias")) if layer.has_bias else None for word in words]
    return ExpertMatrices(first, biases[0], second, biases[1], part)


def _on_cpu(experts: Sequence[Expert], gate: Gate, directory: str | None) -> ExpertsKernel:
    are_packed = all(can_pack(one.first) and can_pack(one.second) for one in experts)
    library = load_library(directory) if are_packed else None
    return PlainExperts(experts, gate) if library is None else PackedExperts(experts, gate, library)


def _mix(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    entry = _entries[int(handle)]
    first = entry.part.first_expert
    output = entry.kernel.mix(x, chosen - first if first else chosen, weights).to(x.dtype)
    if entry.part.sums_ranks:
        sum_over_ranks(output)
    return output


def _shape(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for the compiler
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("experts(Tensor x, Tensor chosen, Tensor weights, Tensor handle) -> Tensor", _mix, _shape)
