"""Experts of a mixture whose matrices are stored in any way, until the CPU kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from workers.forward.weights.base import Storage
from workers.ranks import sum_over_ranks

Gate = Callable[[torch.Tensor], torch.Tensor]
"""What makes the second product's input `[rows, inner]` from the first product `[rows, outputs]`."""
_VECTOR = 32
"""Numbers of float32 that torch's operators compute together, two vectors of AVX-512. Those that are left over may have
other bits."""
_GRAIN = 32768
"""Most numbers that torch's operators do not divide among threads."""


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """The matrices of one expert, and their biases."""

    first: Storage
    """From a hidden state to what the gate takes: mostly a gate and a factor for each inner number."""
    first_bias: torch.Tensor | None
    second: Storage
    """From the inner numbers to a hidden state."""
    second_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has of a layer's experts."""

    sums_ranks: bool = False
    """Whether the sum of all ranks is the output, because each has some inner numbers or some of the experts."""
    first_expert: int = 0
    """Number of the first expert that this rank has."""
    all_experts: int | None = None
    """Experts of all ranks, where each has whole ones; `None`: this rank has as many as the layer."""

    @property
    def is_cut(self) -> bool:
        """Whether the rank has some of the inner numbers of each expert."""
        return self.sums_ranks and self.all_experts is None


WHOLE_LAYER = RankPart()


class PlainExperts:
    """The experts of a layer, multiplied by torch's operators."""

    def __init__(self, experts: Sequence[Expert], gate: Gate) -> None:
        self._inner = experts[0].second.inputs
        self._gate = gate
        self._kernels = [(one.first.kernel(one.first_bias), one.second.kernel(one.second_bias)) for one in experts]

    def mix(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sums of its experts' outputs, float32 `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`. A number that is no expert's chooses none. On CPU no
        token's sum depends on the other tokens.
        """
        found = x.new_zeros((*chosen.shape, x.shape[1]), dtype=torch.float32)
        for expert in sorted(set(chosen.flatten().tolist()) & set(range(len(self._kernels)))):
            tokens, places = torch.where(chosen == expert)
            first, second = self._kernels[expert]
            products = second.multiply(gated_rows(self._gate, first.multiply(x[tokens]), self._inner)).float()
            found[tokens, places] = products * weights[tokens, places, None].float()
        total = torch.zeros_like(found[:, 0])
        for place in range(chosen.shape[1]):
            total += found[:, place]
        return total


class StoredExperts(nn.Module):
    """Stands for the experts of a layer of `transformers`. Each token is multiplied with its own experts alone."""

    def __init__(self, experts: Sequence[Expert], gate: Gate, part: RankPart = WHOLE_LAYER) -> None:
        """`part`: what these are of the layer's experts."""
        super().__init__()
        self.experts = tuple(experts)
        self.gate = gate
        self.part = part
        self._plain = PlainExperts(experts, gate)
        self.register_buffer("place", torch.empty(0), persistent=False)

    @property
    def device(self) -> torch.device:
        """Where the layer's rows are. The matrices may still be on the CPU, and multiply there."""
        place: torch.Tensor = self.get_buffer("place")
        return place.device

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, hidden]` → the weighted sum of its experts' outputs, `[tokens, hidden]`.

        `chosen` and `weights` are `[tokens, experts of a token]`. All ranks that have a part of the layer call this
        together.
        """
        own = self.experts[0].first.device
        output = self._plain.mix(x.to(own), chosen.to(own) - self.part.first_expert, weights.to(own)).to(x)
        if self.part.sums_ranks:
            sum_over_ranks(output)
        return output


def gated_rows(gate: Gate, product: torch.Tensor, inner: int) -> torch.Tensor:
    """The gate of each row of the first product `[rows, outputs]`, `[rows, inner]`: no row depends on the other rows.

    On CPU torch computes what fills no vector, at the end of a tensor or of a thread's part, by other code.
    """
    if product.device.type != "cpu":
        return gate(product)
    grain = _VECTOR // gcd(_VECTOR, inner)
    tile = max(grain, _GRAIN // inner // grain * grain)
    padded = nn.functional.pad(product, (0, 0, 0, -len(product) % grain))
    parts = [gate(part) for part in torch.split(padded, tile)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[: len(product)]


def swiglu(product: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row, times the second half: the gate of most families."""
    gate, up = product.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The gate of gpt-oss: gates and factors alternate, and are bounded."""

    alpha: float
    """Factor of the gate in its sigmoid."""
    limit: float
    """Largest gate, and largest size of a factor."""

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        """`(factor + 1) · gate · sigmoid(alpha · gate)` of each pair of numbers of a row."""
        gate, up = product[..., ::2].clamp(max=self.limit), product[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


def gate_of(layer: Any) -> Gate:
    """What is between the two products of a layer of `transformers`, without the layer's matrices."""
    from transformers.activations import SiLUActivation  # these take most of a second
    from transformers.integrations.moe import _default_apply_gate

    is_usual = type(layer)._apply_gate is _default_apply_gate
    if layer.has_gate and is_usual and type(layer.act_fn) in (SiLUActivation, nn.SiLU):
        return swiglu
    if type(layer).__module__ == "transformers.models.gpt_oss.modeling_gpt_oss":
        return ClampedSwiglu(layer.alpha, layer.limit)
    if not layer.has_gate:
        activation: Gate = layer.act_fn
        return activation
    alone = nn.Module()
    for name, value in (*vars(layer).items(), *layer.named_children()):
        if isinstance(value, int | float) or (callable(value) and name != "forward"):
            setattr(alone, name, value)
    gate: Gate = type(layer)._apply_gate.__get__(alone)
    return gate
