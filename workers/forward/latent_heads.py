"""Multi-head latent attention over the latents themselves (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

Such a layer computes its keys and values from one latent vector per token, and a rotated part that all heads share.
The pool stores these alone: one record for all heads, whose first numbers are the value. What would expand a latent to
a head's keys multiplies the head's queries instead, and what would expand it to the head's values multiplies what
attention returns. The logits are the same up to rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from workers.forward.native.build import load_library
from workers.forward.native.packed_experts import Routing
from workers.forward.native.packed_linear import PackedMatrix, c_function, can_pack, float_layout
from workers.forward.native.structures import Matrix
from workers.forward.operators import Entries, define
from workers.forward.weights.base import LinearKernel, Storage
from workers.forward.weights.plain import PlainStorage

_NAME = "latent_heads"
"""The attribute of an attention module that holds its `LatentHeads`."""


class HeadProduct(Protocol):
    """Matrices of all heads of a layer."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, heads, in]` → `[tokens, heads, out]`."""


@dataclass(frozen=True, slots=True, eq=False)
class _BatchedHeads:
    """One batched product on a GPU."""

    weight: torch.Tensor
    """`[heads, in, out]`."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class _SingleHeads:
    """A product of torch's for each head, where there is no kernel."""

    heads: Sequence[LinearKernel]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([one.multiply(x[:, index]) for index, one in enumerate(self.heads)], dim=1)


class LatentHeads(nn.Module):
    """The matrices of one layer that go from queries to latents and from latents to values."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rotary: int, directory: str | None) -> None:
        """`keys` `[heads, key dim, latent]` and `values` `[heads, value dim, latent]` expand a latent.

        `rotary` counts the numbers of the rotated part. `directory` keeps the compiled CPU kernels.
        """
        super().__init__()
        self.key_dim, self.latent, self.value_dim, self.rotary = keys.shape[1], keys.shape[2], values.shape[1], rotary
        absorbing, expanding = (_product(one, directory) for one in (keys.transpose(1, 2), values))
        self.register_buffer("absorbing", _entries.enter(self, absorbing), persistent=False)
        self.register_buffer("expanding", _entries.enter(self, expanding), persistent=False)

    def absorb(self, query: torch.Tensor, scaling: float | None) -> tuple[torch.Tensor, float]:
        """Queries `[1, heads, tokens, key dim + rotary]` for latents, `[1, heads, tokens, latent + rotary]`.

        Returns them with the factor of their products with the records.
        """
        plain, rotated = torch.split(query[0].transpose(0, 1), [self.key_dim, self.rotary], dim=-1)
        absorbed = torch.ops.pilotfish.heads(plain, self.absorbing, self.latent)
        factor = float((self.key_dim + self.rotary) ** -0.5) if scaling is None else scaling
        return torch.cat((absorbed, rotated), dim=-1).transpose(0, 1)[None], factor

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents `[1, tokens, heads, latent]` → those of values `[1, tokens, heads, value dim]`."""
        expanded: torch.Tensor = torch.ops.pilotfish.heads(attended[0], self.expanding, self.value_dim)
        return expanded[None]


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """The latent heads of an attention module; `None` for a module that stores keys and values of its own."""
    found = module._modules.get(_NAME)
    return found if isinstance(found, LatentHeads) else None


def give_latent_heads(module: nn.Module, heads: LatentHeads) -> None:
    """Let an attention module attend over latents."""
    module.add_module(_NAME, heads)


def _product(matrices: torch.Tensor, directory: str | None) -> HeadProduct:
    """The fastest product with `matrices` `[heads, out, in]`."""
    if matrices.device.type != "cpu":
        return _BatchedHeads(matrices.transpose(1, 2).contiguous())
    heads = [PlainStorage(one.contiguous()) for one in matrices]
    library = load_library(directory) if can_pack(heads[0]) else None
    return _SingleHeads([one.kernel(None) for one in heads]) if library is None else PackedHeads(heads, library)


_entries: Entries[HeadProduct] = Entries()


def multiply_heads(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001 - for the compiler
    """The operator `pilotfish::heads`: `x` `[tokens, heads, in]` → `[tokens, heads, width]`."""
    return _entries[int(handle)].multiply(x).contiguous()


def _shape(x: torch.Tensor, handle: torch.Tensor, width: int) -> torch.Tensor:  # noqa: ARG001
    return x.new_empty((*x.shape[:2], width))


# Opaque to the compiler, which cannot trace packed weights. A handle in a tensor lets one compiled layer serve all.
define("heads(Tensor x, Tensor handle, int width) -> Tensor", multiply_heads, _shape)


class PackedHeads:
    """The matrices of all heads of a layer, all of one shape. Not thread-safe."""

    def __init__(self, heads: Sequence[Storage], library: ctypes.CDLL) -> None:
        layout = float_layout(library)
        self._outputs = heads[0].outputs
        self._packed = [PackedMatrix(one, None, layout) for one in heads]
        self._matrices = (Matrix * len(heads))(*(one.matrix for one in self._packed))
        self._heads = torch.arange(len(heads))
        self._ends = torch.empty(len(heads), dtype=torch.int64)
        self._multiply = c_function(library.pilotfish_experts_first, 5, 1)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, heads, in]` → `[tokens, heads, out]` of the same type. No token depends on the other tokens."""
        tokens, heads, _ = x.shape
        if not tokens:
            return x.new_empty((0, heads, self._outputs))
        rows = x.float().contiguous()
        chosen, places = self._heads.repeat(tokens), torch.empty(tokens * heads, dtype=torch.int64)
        routing = Routing(heads, tokens * heads, 1, chosen.data_ptr(), self._ends.data_ptr(), places.data_ptr())
        taken, product = torch.empty_like(rows), torch.empty((heads, tokens, self._outputs))
        addresses = (rows.data_ptr(), taken.data_ptr(), product.data_ptr())
        self._multiply(self._matrices, ctypes.byref(routing), *addresses, 0)
        return product.transpose(0, 1).to(x.dtype)
