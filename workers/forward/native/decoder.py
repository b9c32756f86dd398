"""A Llama-like model whose whole forward pass is one call into the CPU kernels. See decoder.c."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from workers.forward.layout import RowShape
from workers.forward.loaded_model import WHOLE_PASS, PassOptions, PassOutput
from workers.forward.native.attention import KINDS, StepHeader, address, build_native_step
from workers.forward.native.decoder_shape import DecoderShape
from workers.forward.native.structures import Decoder, DecoderLayer, Matrix, Pass, WorkBuffers
from workers.kv.groups import KvCacheGroups
from workers.kv.pool import KvPool

_LEAST_ANGLES = 1024


Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From a tensor of the wanted type and positions `[1, positions]` to cosines and sines `[1, positions, dim]`."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedDecoder:
    """The weights of a model as the kernels read them, and the C structures that point to them."""

    shape: DecoderShape
    dtype: torch.dtype
    """The type of stored keys and values, unless the pool has 8 bits."""
    tokens: int
    """Rows of the embedding."""
    vocabulary: int
    """Outputs of the head."""
    layers: ctypes.Array[DecoderLayer]
    final_norm: int
    """Address of the weights of the last norm."""
    head: Matrix
    embedding: torch.Tensor | None
    """`[tokens, hidden]`; `None` if `table` has the embeddings, or the head serves as the table."""
    table: Matrix | None
    """Packed embeddings, which are rounded to `dtype` as they are read."""
    rotary: Rotary
    memory: tuple[torch.Tensor, ...]
    """All memory that `layers`, `final_norm`, `head` and `table` point to."""


class NativeDecoder:
    """A packed model, and the call into the kernels."""

    def __init__(self, packed: PackedDecoder, library: ctypes.CDLL) -> None:
        self.packed = packed
        self._library = library
        self._decode = library.pilotfish_decode
        self._decode.argtypes = [ctypes.POINTER(Decoder), ctypes.POINTER(StepHeader), ctypes.POINTER(Pass)]
        self._decode.restype = None
        self._shape = shape = packed.shape
        self._rotary = packed.rotary
        self._tokens, self._vocabulary = packed.tokens, packed.vocabulary
        self._embedding = packed.embedding
        self._layers = packed.layers
        self._apart = 2 * shape.inner if any(layer.gate_up[1].outputs for layer in packed.layers) else 0
        """Numbers of a token that gates and ups of two matrices take; 0 where no layer has these."""
        self._decoder = Decoder(
            *(len(self._layers), shape.hidden, shape.heads, shape.kv_heads, shape.dim, shape.inner),
            *(KINDS[packed.dtype], shape.epsilon, shape.scale, self._layers, packed.final_norm, packed.head),
        )
        if self._embedding is not None:
            self._decoder.embedding_kind = KINDS[self._embedding.dtype]
            self._decoder.embedding = self._embedding.data_ptr()
        elif packed.table is not None:
            self._decoder.embedding_kind, self._decoder.table = KINDS[packed.dtype], packed.table
        self._kv_groups: KvCacheGroups | None = None
        self._angles: tuple[torch.Tensor, ...] = ()
        self._buffers = WorkBuffers()

    def bind(self, pool: KvPool) -> None:
        self._kv_groups = pool.kv_groups
        self._decoder.kv_kind = KINDS[pool.store.stored or self.packed.dtype]
        for layer, placement in zip(self._layers, pool.kv_groups.placements, strict=True):
            layer.keys, layer.values = (
                pool.keys[placement.block_layer].data_ptr(),
                pool.values[placement.block_layer].data_ptr(),
            )
            layer.table = placement.table
            layer.window, layer.sinks = placement.window.size or 0, placement.window.sinks

    def share_embedding(self, table: torch.Tensor | None) -> torch.Tensor | None:
        """Read embeddings from a table of another decoder with the same ones, and free the own table.

        Returns the table that is read; `None` if packed rows, as those of the head, serve as the table.
        """
        if table is not None and self._embedding is not None:
            self.packed = replace(self.packed, embedding=table)
            self._embedding, self._decoder.embedding = table, table.data_ptr()
        return self._embedding

    def compute(
        self,
        tokens: Sequence[int],
        selected: Sequence[int],
        rows: Sequence[RowShape],
        options: PassOptions = WHOLE_PASS,
        taps: Sequence[int] = (),
    ) -> PassOutput:
        """Run one step over the bound pool. Raises `IndexError` for a token that the model does not have."""
        if self._kv_groups is None:
            raise RuntimeError("bind a pool before computing")
        step = build_native_step(rows, self._kv_groups)
        if options.inputs is None and not 0 <= min(tokens) <= max(tokens) < self._tokens:
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)}: the model has {self._tokens}")
        ids, indices = array("q", tokens), array("q", selected)
        tapped = array("q", taps)
        self._extend_angles(step.end)
        logits = torch.empty((len(indices), self._vocabulary))
        layers = options.partial.layers or len(self._layers)
        skip = array("B", options.partial.skipped_parts(len(self._layers)))
        exit_norm = None if options.partial.exit_norm is None else options.partial.exit_norm.float().contiguous()
        inputs = None if options.inputs is None else options.inputs.float().contiguous()
        hidden = torch.empty((len(ids), len(tapped) * self._shape.hidden), dtype=torch.bfloat16) if tapped else None
        work = Pass(
            *(address(ids), address(indices), len(indices), logits.data_ptr()),
            *self._work_buffers(len(ids), len(indices)),
            *(layers, address(skip) if skip else None),
            *(None if given is None else given.data_ptr() for given in (exit_norm, inputs)),
            *(address(tapped), len(tapped), None if hidden is None else hidden.data_ptr()),
        )
        self._decode(ctypes.byref(self._decoder), ctypes.byref(step.header), ctypes.byref(work))
        return PassOutput(logits, hidden)

    def _extend_angles(self, length: int) -> None:
        """Extend the rotary cosines and sines, float32 `[positions, dim]`, to at least `length` positions."""
        if not self._angles or length > len(self._angles[0]):
            positions = torch.arange(max(_LEAST_ANGLES, 1 << (length - 1).bit_length()))[None]
            self._angles = tuple(part[0].contiguous() for part in self._rotary(torch.empty(1), positions))
            self._decoder.cos, self._decoder.sin = (part.data_ptr() for part in self._angles)

    def _work_buffers(self, tokens: int, wanted: int) -> list[int]:
        """Addresses of the buffers of `Pass` from `x` on. The next pass reuses them."""
        shape = self._shape
        queries, stored = shape.heads * shape.dim, shape.kv_heads * shape.dim
        widest = max(shape.hidden, queries)
        sizes = [tokens * shape.hidden, max(tokens, wanted) * widest, tokens * shape.inner]
        sizes += [tokens * max(queries + 2 * stored, self._apart), tokens * queries, tokens * stored, tokens * stored]
        return self._buffers.addresses(sizes)
