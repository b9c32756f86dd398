"""The decoder layers of a drafting module, all in one call of the CPU kernels. See decoder.c.

Keys and values of a sequence are in slots side by side, and a mask says which slots a token attends to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from workers.forward.native.attention import KINDS
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedMatrix, gate_up, kernel_layout
from workers.forward.native.structures import GATE_UP_PARTS, QKV_PARTS, Decoder, DecoderLayer, Matrix, WorkBuffers
from workers.forward.weights.choice import stored_as

_LEAST_ANGLES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one Llama-like layer, all on CPU. Norms are RMS norms."""

    qkv: torch.Tensor  # [(heads + 2 KV heads) * head width, hidden, or inputs of the first layer]
    out: torch.Tensor  # [hidden, heads * head width]
    gate: torch.Tensor  # [inner, hidden]
    up: torch.Tensor  # [inner, hidden]
    down: torch.Tensor  # [hidden, inner]
    input_norm: torch.Tensor | None  # [inputs of qkv]; None: they are not normalised
    post_norm: torch.Tensor  # [hidden]
    query_norm: torch.Tensor | None = None  # [head width], of each head
    key_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None  # [outputs of qkv]
    out_bias: torch.Tensor | None = None  # [hidden]


@dataclass(frozen=True, slots=True, eq=False)
class WindowShape:
    """What the sizes of the weights do not tell."""

    heads: int
    kv_heads: int
    head_width: int
    epsilon: float
    rotary_steps: torch.Tensor
    """The angle for one position of each pair of elements, float32 [head width / 2], on CPU."""
    rotary_factor: float = 1.0
    """Factor on rotated queries and keys."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowPiece:
    """Consecutive tokens of one sequence in a pass, and where their keys and values go."""

    keys: torch.Tensor
    """float32 [layers, KV heads, slots, head width], on the module's device; the slots of a head are contiguous."""
    values: torch.Tensor
    """Of the same shape and strides."""
    slot: int
    """The first token's slot; the other tokens' follow."""
    count: int
    """Number of tokens."""
    is_seen: torch.Tensor | None
    """Whether each slot up to the last token's is attended to, bool [tokens, slots], or [slots] for all tokens, on
    the host; `None` if all are. Every token must attend to something."""

    @property
    def end(self) -> int:
        """The slot after the last token's."""
        return self.slot + self.count


class _Piece(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("layer", "head", "first", "slot", "slots")),
        ("seen", ctypes.c_void_p),
        ("seen_stride", ctypes.c_int64),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("position", "piece_of", "piece", "x", "inputs")),
        *((name, ctypes.c_void_p) for name in ("input", "gated", "qkv", "query")),
    ]


class WindowLayers:
    """Packed layers. Not thread-safe."""

    def __init__(
        self, layers: Sequence[LayerWeights], shape: WindowShape, dtype: torch.dtype, library: ctypes.CDLL
    ) -> None:
        """`dtype` is that of the packed weights; see `stored_as`. All widths are even for bfloat16."""
        self._shape = shape
        self._dtype = dtype
        self._inner, self._hidden = layers[0].gate.shape
        self._first_inputs = layers[0].qkv.shape[1]
        self._kept: list[PackedMatrix | torch.Tensor] = []
        self._layers = (DecoderLayer * len(layers))(*(self._packed(one, library) for one in layers))
        sizes = (self._hidden, shape.heads, shape.kv_heads, shape.head_width, self._inner)
        self._decoder = Decoder(
            *(len(layers), *sizes, KINDS[torch.float32], shape.epsilon, shape.head_width**-0.5, self._layers)
        )
        self._angles: tuple[torch.Tensor, ...] = ()
        self._work = WorkBuffers()
        self._compute = library.pilotfish_window_layers
        self._compute.argtypes = [ctypes.POINTER(Decoder), ctypes.POINTER(_Pass)]
        self._compute.restype = None

    def run(
        self,
        residual: torch.Tensor,
        positions: Sequence[int],
        pieces: Sequence[WindowPiece],
        first_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the keys and values of all pieces; return the residual stream after the layers.

        `residual` is the stream before them, float32 `[tokens, hidden]`: all pieces' tokens, one after another, at
        `positions`. No two pieces share slots. `first_inputs`, float32 `[tokens, inputs]`, are what the first layer's
        attention reads in place of the stream. Raises `ValueError` for another shape or dtype.
        """
        tokens = sum(piece.count for piece in pieces)
        if residual.shape != (tokens, self._hidden) or residual.dtype is not torch.float32 or len(positions) != tokens:
            raise ValueError(
                f"residual: {residual.dtype} {tuple(residual.shape)} at {len(positions)} positions is refused; "
                f"it must be float32 {(tokens, self._hidden)}"
            )
        self._check_first(first_inputs, tokens)
        if not tokens:
            return residual
        first_rows = None if first_inputs is None else first_inputs.contiguous()
        found = residual.clone(memory_format=torch.contiguous_format)
        self._extend_angles(max(positions) + 1)
        structures = (_Piece * len(pieces))()
        masks: list[torch.Tensor | None] = []
        first = 0
        for index, piece in enumerate(pieces):
            mask = None if piece.is_seen is None else piece.is_seen.contiguous()
            masks.append(mask)
            structures[index] = _structure(piece, first, mask)
            first += piece.count
        position = np.array(positions, dtype=np.int64)
        piece_of = np.repeat(np.arange(len(pieces), dtype=np.int32), [piece.count for piece in pieces])
        work = _Pass(
            *(tokens, position.ctypes.data, piece_of.ctypes.data, ctypes.addressof(structures)),
            *(found.data_ptr(), None if first_rows is None else first_rows.data_ptr(), *self._buffers(tokens)),
        )
        self._compute(ctypes.byref(self._decoder), ctypes.byref(work))
        return found

    def _packed(self, layer: LayerWeights, library: ctypes.CDLL) -> DecoderLayer:
        layout = kernel_layout(library)
        stored = (stored_as(one, self._dtype) for one in (layer.qkv, layer.out, layer.gate, layer.up, layer.down))
        first, out, gate, up, down = stored
        sources = (first, out, gate_up(gate, up, layout.columns), down)
        biases = (layer.qkv_bias, layer.out_bias, None, None)
        matrices = [PackedMatrix(one, bias, layout) for one, bias in zip(sources, biases, strict=True)]
        norms = [
            None if norm is None else norm.detach().float().clone(memory_format=torch.contiguous_format)
            for norm in (layer.input_norm, layer.post_norm, layer.query_norm, layer.key_norm)
        ]
        self._kept += [*matrices, *(norm for norm in norms if norm is not None)]
        qkv, own_out, both, own_down = (packed.matrix for packed in matrices)
        parts = (Matrix * QKV_PARTS)(qkv), own_out, (Matrix * GATE_UP_PARTS)(both), own_down
        return DecoderLayer(*parts, *(None if norm is None else norm.data_ptr() for norm in norms))

    def _check_first(self, inputs: torch.Tensor | None, tokens: int) -> None:
        """Raise `ValueError` unless these are what the first layer's attention of so many tokens reads."""
        wanted = (tokens, self._first_inputs)
        if inputs is None and self._first_inputs != self._hidden:
            raise ValueError(f"first_inputs: None is refused; it must be float32 {wanted}")
        if inputs is not None and (inputs.shape != wanted or inputs.dtype is not torch.float32):
            raise ValueError(
                f"first_inputs: {inputs.dtype} {tuple(inputs.shape)} is refused; it must be float32 {wanted}"
            )

    def _extend_angles(self, length: int) -> None:
        """Extend the rotary cosines and sines, float32 `[positions, head width]`, to at least `length` positions."""
        if not self._angles or length > len(self._angles[0]):
            shape = self._shape
            positions = torch.arange(max(_LEAST_ANGLES, 1 << (length - 1).bit_length()), dtype=torch.float32)
            angles = (positions.unsqueeze(1) * shape.rotary_steps).repeat(1, 2)
            self._angles = (angles.cos().mul_(shape.rotary_factor), angles.sin().mul_(shape.rotary_factor))
            self._decoder.cos, self._decoder.sin = (part.data_ptr() for part in self._angles)

    def _buffers(self, tokens: int) -> list[int]:
        """Addresses of the work buffers `input`, `gated`, `qkv` and `query`. The next pass reuses them."""
        shape = self._shape
        queries, stored = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        widest = max(self._hidden, queries, self._first_inputs)
        sizes = [tokens * width for width in (widest, self._inner, queries + 2 * stored, queries)]
        return self._work.addresses(sizes)


def pack_window_layers(
    layers: Sequence[LayerWeights], shape: WindowShape, dtype: torch.dtype, directory: str | None = None
) -> WindowLayers | None:
    """Pack layers for the kernels. `None` without a compiler, on another device, or for odd widths in bfloat16.

    `directory` keeps the compiled kernels between starts.
    """
    widths = [width for one in layers for matrix in (one.qkv, one.out, one.down) for width in matrix.shape]
    if layers[0].qkv.device.type != "cpu" or (dtype is torch.bfloat16 and any(width % 2 for width in widths)):
        return None
    library = load_library(directory)
    return None if library is None else WindowLayers(layers, shape, dtype, library)


def _structure(piece: WindowPiece, first: int, mask: torch.Tensor | None) -> _Piece:
    layer, head, _, _ = piece.keys.stride()
    seen, stride = (None, 0) if mask is None else (mask.data_ptr(), mask.stride(0) if mask.dim() == 2 else 0)
    return _Piece(
        *(piece.keys.data_ptr(), piece.values.data_ptr(), layer, head, first, piece.slot, piece.end, seen, stride)
    )
