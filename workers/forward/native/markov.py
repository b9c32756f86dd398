"""Ranks the candidates of blocks' slots from left to right in one call of the CPU kernels. markov.c has the kernel."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedProduct
from workers.forward.native.structures import Matrix, WorkBuffers
from workers.forward.weights.base import Kind
from workers.forward.weights.choice import stored_as


class MarkovKind(IntEnum):
    """How a token's embedding becomes what is multiplied with the second matrix."""

    AS_IT_IS = 0
    GATED = 1
    """Times a gate."""
    RECURRENT = 2
    """By a recurrent layer, which has a state."""


@dataclass(frozen=True, slots=True, eq=False)
class MarkovWeights:
    """The weights of a Markov head and of the confidence head, all on CPU."""

    kind: MarkovKind
    first: Tensor
    """[vocabulary, rank], float32 or bfloat16: the embeddings of the tokens before."""
    second: Tensor
    """[draft vocabulary, rank]"""
    inner: Tensor
    """[units, hidden size + rank + rank] for the slot's vector, the embedding and the state. The units are those of the
    gate, or of gate, candidate and output, and the confidence's."""
    bias: Tensor
    """[units]"""
    is_sure: bool
    """Whether the last unit is the confidence in the first candidate."""


class _Head(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "rank", "hidden", "units")),
        ("first", ctypes.c_void_p),
        ("first_kind", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("inner", "bias")),
        ("is_sure", ctypes.c_int64),
        ("second", Matrix),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "depths", "siblings", "most")),
        *((name, ctypes.c_void_p) for name in ("last", "vocabulary", "hidden", "base", "factors")),
        *((name, ctypes.c_void_p) for name in ("tokens", "confidences", "places")),
        *((name, ctypes.c_void_p) for name in ("slots", "states", "kept", "paths", "before", "input", "logits")),
        *((name, ctypes.c_void_p) for name in ("best", "columns", "totals", "sure")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class GivenSlots:
    """The slots of rows before the Markov head."""

    base: Tensor
    """Float32 [rows, depths, draft vocabulary]: the output head's logits, divided by the temperature, and the noise."""
    hidden: Tensor
    """Float32 [rows, depths, hidden size]: the slots' vectors."""
    last: Tensor
    """int64 [rows]: the tokens before the first slots."""
    factors: Tensor | None = None
    """[rows]: one divided by the temperature, which the Markov head's bias is multiplied with; `None`: 1."""


@dataclass(frozen=True, slots=True, eq=False)
class RankedSlots:
    """The candidates of rows at each depth, and which of them are the parents of the next depth."""

    levels: Sequence[tuple[Tensor, Tensor]]
    """Candidates of each depth: tokens, int64, and confidences, float32, both [rows, parents, siblings], best first."""
    parents: Sequence[Tensor]
    """Parents of the next depth, for each depth but the last: int64 [rows, parents], as indices among the candidates of
    a row, the most probable first."""


class MarkovSlots:
    """Packed weights. Not thread-safe."""

    def __init__(self, weights: MarkovWeights, dtype: torch.dtype, library: ctypes.CDLL) -> None:
        """`dtype` is that of the packed second matrix; see `stored_as`."""
        self._first = weights.first.detach().contiguous()
        self._second = PackedProduct(stored_as(weights.second, dtype), library)
        self.multiply = self._second.multiply
        """The product with the second matrix alone: float32 [rows, rank] to float32 [rows, draft vocabulary]."""
        self._inner = weights.inner.detach().float().T.contiguous()
        self._bias = weights.bias.detach().float().contiguous()
        self._rank = self._first.shape[1]
        self._hidden = len(self._inner) - 2 * self._rank
        kind = Kind.BFLOAT16 if self._first.dtype is torch.bfloat16 else Kind.FLOAT32
        self._head = _Head(
            *(int(weights.kind), self._rank, self._hidden, len(self._bias), self._first.data_ptr(), int(kind)),
            *(self._inner.data_ptr(), self._bias.data_ptr(), int(weights.is_sure), self._second.matrix.matrix),
        )
        self._work = WorkBuffers()
        self._compute = library.pilotfish_rank_slots
        self._compute.argtypes = [ctypes.POINTER(_Head), ctypes.POINTER(_Pass)]
        self._compute.restype = None

    def rank(self, slots: GivenSlots, vocabulary: Tensor | None, *, siblings: int, most: int) -> RankedSlots:
        """Rank the candidates of rows.

        `vocabulary`, int64, has the tokens of the logits, if they are not in order. `siblings` candidates are listed
        below each of `most` parents. Raises `ValueError` for another shape or type.
        """
        base, hidden, last = slots.base.contiguous(), slots.hidden.contiguous(), slots.last.to(torch.int64).contiguous()
        rows, depths, size = base.shape
        outputs = self._second.outputs
        if size != outputs or hidden.shape != (rows, depths, self._hidden) or last.shape != (rows,):
            raise ValueError(
                f"base {tuple(base.shape)}, hidden {tuple(hidden.shape)}, last {tuple(last.shape)}: refused; they must "
                f"be [rows, depths, {outputs}], [rows, depths, {self._hidden}] and [rows]"
            )
        if base.dtype is not torch.float32 or hidden.dtype is not torch.float32 or not 1 <= siblings <= size:
            raise ValueError(
                f"{base.dtype}, {hidden.dtype} and {siblings} siblings are refused; needed float32, and 1 to {size}"
            )
        factors = None if slots.factors is None else slots.factors.float().contiguous()
        tokens = torch.empty((depths, rows, most, siblings), dtype=torch.int64)
        confidences = torch.empty((depths, rows, most, siblings))
        places = torch.empty((depths, rows, most), dtype=torch.int64)
        work = _Pass(
            *(rows, depths, siblings, most, last.data_ptr(), None if vocabulary is None else vocabulary.data_ptr()),
            *(hidden.data_ptr(), base.data_ptr(), None if factors is None else factors.data_ptr()),
            *(one.data_ptr() for one in (tokens, confidences, places)),
            *self._buffers(rows, depths, most, siblings),
        )
        self._compute(ctypes.byref(self._head), ctypes.byref(work))
        counts = [1]
        for _ in range(depths - 1):
            counts.append(min(most, counts[-1] * siblings))
        return RankedSlots(
            [(tokens[depth, :, :count], confidences[depth, :, :count]) for depth, count in enumerate(counts)],
            [places[depth, :, :count] for depth, count in enumerate(counts[1:])],
        )

    def _buffers(self, rows: int, depths: int, most: int, siblings: int) -> list[int]:
        """Addresses of the work buffers, in the order of the structure. Those of int64 numbers take two places each."""
        parents, size = rows * most, self._second.outputs
        states, listed = parents * self._rank, parents * siblings
        return self._work.addresses(
            [
                *(rows * depths * len(self._bias), states, states, parents, 2 * parents),
                *(states, parents * size, listed, 2 * listed, parents, parents),
            ]
        )


def load_markov_slots(weights: MarkovWeights, dtype: torch.dtype, directory: str | None) -> MarkovSlots | None:
    """Pack weights that are on a CPU. Returns `None` elsewhere, without a compiler, or if bfloat16 has an odd rank.

    `directory` keeps the compiled kernels.
    """
    is_odd = dtype is torch.bfloat16 and weights.second.shape[1] % 2
    library = load_library(directory) if weights.second.device.type == "cpu" and not is_odd else None
    return None if library is None else MarkovSlots(weights, dtype, library)
