"""The paged attention kernel for CPU (native/attention.c): ragged rows over the blocks of their tables.

Tokens and trees of all rows are work items of one parallel loop; nothing is gathered and no mask is built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workers.forward.backends.base import (
    AttentionBackend,
    AttentionSetting,
    BackendUnavailable,
    Capabilities,
    Feature,
    StepKind,
    latent_groups,
    register_backend,
    with_whole_heads,
)
from workers.forward.layout import RowShape
from workers.forward.native.attention import (
    KINDS,
    MOST_DIM,
    MOST_LATENT,
    MOST_VECTORS,
    LayerHeader,
    NativeStep,
    StepHeader,
    build_native_source_step,
    build_native_step,
)
from workers.forward.native.build import load_library
from workers.kv.eight_bits import STORED_TYPES

_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}
"""Names of the kernels by the type of what is stored."""

CAPABILITIES = Capabilities(
    steps=frozenset({StepKind.RAGGED}),
    features=frozenset(
        {Feature.WINDOWS, Feature.SINKS, Feature.TREES, Feature.SOURCES, Feature.LATENTS, Feature.ALIBI}
    ),
    devices=frozenset({"cpu"}),
    kv_types=frozenset({torch.bfloat16, torch.float32}),
    stored_types=frozenset(STORED_TYPES.values()),
    head_sizes=range(1, MOST_DIM + 1),
    latent_sizes=range(1, MOST_LATENT + 1),
    most_heads_per_kv=MOST_VECTORS,
    is_batch_invariant=True,
)


@register_backend("native", CAPABILITIES, preference=20)
class NativeBackend(AttentionBackend[NativeStep]):
    """The kernel over the pool of one model. Opening it raises `BackendUnavailable` if no compiler is found."""

    def __init__(self, setting: AttentionSetting) -> None:
        library = load_library(setting.code_directory)
        if library is None:
            raise BackendUnavailable("the CPU kernels cannot be built")
        self._store = setting.store
        self._layers = setting.layers
        slopes = (shape.alibi_slopes for shape in setting.layers)
        self._slopes = [None if one is None else torch.tensor(one, dtype=torch.float32) for one in slopes]
        self._write, self._attend = (
            library[f"pilotfish_{verb}_{_NAMES[setting.store.stored or setting.dtype]}"] for verb in ("write", "attend")
        )
        for function in (self._write, self._attend):
            function.argtypes = [ctypes.POINTER(StepHeader), ctypes.POINTER(LayerHeader)]
            function.restype = None

    def plan(self, rows: Sequence[RowShape]) -> NativeStep:
        """The kernel's structure of a step."""
        return build_native_step(rows, self._store.kv_groups)

    def plan_sources(self, rows: Sequence[RowShape]) -> NativeStep:
        """The kernel's structure of a step whose rows read their sources."""
        return build_native_source_step(rows, self._store.kv_groups)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: NativeStep) -> None:
        """Store keys and values at the step's slots."""
        keys, values = with_whole_heads(keys), with_whole_heads(values)
        header = self._header(layer)
        header.key, header.value = keys.data_ptr(), values.data_ptr()
        header.query_kind = KINDS[keys.dtype]
        header.key_token, header.key_head, _ = keys.stride()
        header.value_token, header.value_head, _ = values.stride()
        self._write(ctypes.byref(metadata.header), ctypes.byref(header))

    def attend(self, layer: int, queries: torch.Tensor, metadata: NativeStep, scaling: float | None) -> torch.Tensor:
        """Attend to the blocks of each row's table."""
        queries = with_whole_heads(queries)
        output = torch.empty((*queries.shape[:2], self._layers[layer].value_dim), dtype=queries.dtype)
        header = self._header(layer)
        if metadata.reads_sources:
            header.window = 0
        header.query, header.output = queries.data_ptr(), output.data_ptr()
        header.query_token, header.query_head, _ = queries.stride()
        header.query_kind = header.output_kind = KINDS[queries.dtype]
        header.heads = queries.shape[1]
        header.scale = queries.shape[2] ** -0.5 if scaling is None else scaling
        self._attend(ctypes.byref(metadata.header), ctypes.byref(header))
        return output

    def _header(self, layer: int) -> LayerHeader:
        """The arguments of a layer that both calls share."""
        placement = self._store.kv_groups.placements[layer]
        keys, values = self._store.of(layer)
        shape = self._layers[layer]
        return LayerHeader(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            kv_heads=keys.shape[2] if shape.latent_dim is None else latent_groups(shape.heads_per_kv),
            latent=shape.latent_dim or 0,
            dim=keys.shape[3],
            table=placement.table,
            window=placement.window.size or 0,
            sinks=placement.window.sinks,
            slopes=None if (slopes := self._slopes[layer]) is None else slopes.data_ptr(),
        )
