"""Experts of a mixture for decoding: grouped by expert, so that a step reads the weights of an expert once.

The rows of all sequences that chose an expert are multiplied together. No row's sum depends on the other rows. The
operator `pilotfish::experts` is opaque to the compiler, as products of linear layers are.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import nn

from workers.forward.native.build import load_library
from workers.forward.native.packed_experts import PackedExperts
from workers.forward.operators import define
from workers.forward.weights.base import Storage
from workers.forward.weights.choice import store
from workers.forward.weights.experts import Expert, Gate, PlainExperts, StoredExperts, gate_of
from workers.forward.weights.plain import PlainStorage
from workers.ranks import sum_over_ranks


class ExpertsKernel(Protocol):
    """The experts of a layer in some layout, and the sums of their products."""

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sums of its experts' outputs, `[tokens, hidden]`; on CPU in float32.

        `chosen` and `weights` are `[tokens, experts of a token]`. No token's sum depends on the other tokens.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A kernel, and whether the sum of all ranks is the output."""

    kernel: ExpertsKernel
    sums_ranks: bool


_entries: dict[int, _Entry] = {}
_handles = count()


class FastExperts(nn.Module):
    """Replaces the experts of a layer of `transformers`, or stored ones."""

    def __init__(self, kernel: ExpertsKernel, *, sums_ranks: bool) -> None:
        """`sums_ranks`: `kernel` has one rank's inner numbers, and the sum of all ranks is the output."""
        super().__init__()
        self.kernel = kernel
        handle = next(_handles)
        _entries[handle] = _Entry(kernel, sums_ranks)
        weakref.finalize(self, _entries.pop, handle, None)
        self.register_buffer("handle", torch.tensor(handle), persistent=False)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sum of its experts' outputs, `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`.
        """
        output: torch.Tensor = torch.ops.pilotfish.experts(x, chosen, weights, self.handle)
        return output


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
        return FastExperts(_on_cpu(layer.experts, layer.gate, directory), sums_ranks=layer.sums_ranks)
    matrices = matrices_of(layer)
    if matrices is None or matrices.first.device.type != "cpu":
        return None
    kernel = _on_cpu(matrices.stored(quantization), gate_of(layer), directory)
    return FastExperts(kernel, sums_ranks=matrices.is_cut)


def sums_ranks(layer: Any) -> bool:
    """Whether a layer has one rank's inner numbers, and the sum of all ranks is its output."""
    matrices = None if isinstance(layer, StoredExperts) else matrices_of(layer)
    return layer.sums_ranks if isinstance(layer, StoredExperts) else matrices is not None and matrices.is_cut


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
    is_cut: bool
    """Whether these are one rank's inner numbers."""

    def stored(self, quantization: str) -> list[Expert]:
        """Each expert in the storage of the setting `quantization`."""
        none = [None] * len(self.first)
        first: Any = none if self.first_biases is None else self.first_biases
        second: Any = none if self.second_biases is None else self.second_biases
        return [
            Expert(
                store(self.first[index], quantization),
                one,
                store(self.second[index], quantization, cut_inputs=self.is_cut),
                other,
            )
            for index, (one, other) in enumerate(zip(first, second, strict=True))
        ]


def matrices_of(layer: Any) -> ExpertMatrices | None:
    """The matrices of a layer of `transformers`; `None` if its kind or its sharding is not one of the usual."""
    from torch.distributed.tensor import DTensor  # takes most of a second

    words = "gate_up_proj" if layer.has_gate else "up_proj", "down_proj"
    own = [getattr(layer, word, None) for word in words]
    if not all(isinstance(one, nn.Parameter) for one in own):
        return None
    is_cut = [isinstance(one, DTensor) for one in own]
    values: list[Any] = [one.to_local() if isinstance(one, DTensor) else one for one in own]
    is_grouped = layer.config._experts_implementation == "grouped_mm" and hasattr(type(layer).forward, "__wrapped__")
    is_sharded_as_usual = not any(is_cut) or (all(is_cut) and not layer.has_bias)
    if not is_grouped or layer.has_post_expert_norm or not is_sharded_as_usual:
        return None
    first, second = (value.detach().transpose(1, 2) if layer.is_transposed else value.detach() for value in values)
    biases = [getattr(layer, f"{word}_bias").detach() if layer.has_bias else None for word in words]
    return ExpertMatrices(first, biases[0], second, biases[1], any(is_cut))


def _on_cpu(experts: Sequence[Expert], gate: Gate, directory: str | None) -> ExpertsKernel:
    library = load_library(directory) if all(map(_is_packed, experts)) else None
    return PlainExperts(experts, gate) if library is None else PackedExperts(experts, gate, library)


def _is_packed(expert: Expert) -> bool:
    """Whether the CPU kernels take the matrices of an expert."""
    return all(one.device.type == "cpu" and (one.is_widened or _is_plain(one)) for one in (expert.first, expert.second))


def _is_plain(storage: Storage) -> bool:
    if not isinstance(storage, PlainStorage):
        return False
    dtype = storage.weight.dtype
    return dtype is torch.float32 or (dtype is torch.bfloat16 and storage.inputs % 2 == 0)


def _mix(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    entry = _entries[int(handle)]
    output = entry.kernel.mix(x, chosen, weights).to(x.dtype)
    if entry.sums_ranks:
        sum_over_ranks(output)
    return output


def _shape(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - for the compiler
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define("experts(Tensor x, Tensor chosen, Tensor weights, Tensor handle) -> Tensor", _mix, _shape)
