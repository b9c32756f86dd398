"""FlashAttention-4 (Zadouri et al. 2026) for long chunks of prompts, and the Triton kernels for all other rows.

The library masks no draft trees unless it reads every block, and on Hopper it does not divide the keys of a row among
programs, which few decoding rows need. Long chunks need neither. Each is a call of its own with one split of keys, and
no CUDA graph has so many tokens: a row has the same bits beside any others.

It has not run on a GPU yet. It is used only where `target.attention_backend` names it, and after its trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from workers.forward.backends import triton
from workers.forward.backends.base import AttentionSetting, BackendUnavailable, Feature, register_backend
from workers.forward.backends.triton import TritonBackend, TritonStep
from workers.forward.graph_sizes import MOST_TOKENS
from workers.forward.layout import RowShape, blocks_read
from workers.kv.groups import AttentionWindow
from workers.transfer import StepArray, to_device_together

_LONG = MOST_TOKENS + 1
"""Fewest tokens of a long chunk: one more than a CUDA graph may have."""
_GENERATIONS = (9, 10, 11)
"""Major compute capabilities for which the library reads keys and values in blocks: Hopper and Blackwell's servers."""

CAPABILITIES = replace(
    triton.CAPABILITIES,
    features=frozenset({Feature.WINDOWS, Feature.TREES, Feature.SOFT_CAP, Feature.LEARNED_SINKS}),
    kv_types=frozenset({torch.bfloat16, torch.float16}),
    stored_types=frozenset(),
    head_sizes=range(16, 257, 16),
    prompts=(*triton.CAPABILITIES.prompts, _LONG),
)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A long chunk of a prompt."""

    tokens: slice
    """Where the tokens of the chunk are among the tokens of the step."""
    blocks: dict[tuple[int, AttentionWindow], tuple[torch.Tensor, torch.Tensor]]
    """By block table and window, the blocks that it reads, int32 `[1, blocks]`, and the number of positions from the
    first of them to its last token, int32 `[1]`."""


@dataclass(frozen=True, slots=True, eq=False)
class FlashStep(TritonStep):
    """The metadata of a step outside of CUDA graphs."""

    chunks: tuple[Chunk, ...]
    """What the Triton kernels do not compute."""


@register_backend("flash", CAPABILITIES, preference=-1)
class FlashBackend(TritonBackend):
    """The kernels of both over the pool of one model. Opening it raises `BackendUnavailable` without the packages."""

    def __init__(self, setting: AttentionSetting) -> None:
        super().__init__(setting)
        self._flash = _library(setting.device)

    def _computes(self, row: RowShape) -> bool:
        return row.width < _LONG or bool(row.tree)

    def plan(self, rows: Sequence[RowShape]) -> FlashStep:
        """Tiles and blocks of all rows, and what the long chunks among them read, copied to the device in one piece."""
        size = self._store.kv_groups.layout.block_size
        planned = self.plan_packed(rows)
        long = [index for index, row in enumerate(rows) if not self._computes(row)]
        read = dict.fromkeys((placement.table, placement.window) for placement in self._store.kv_groups.placements)
        counts = [[_positions(rows[index], window, size) for _, window in read] for index in long]
        array: StepArray = np.array(counts, dtype=np.int32).reshape(len(long), len(read))
        *sent, positions = to_device_together([*planned.arrays, array], self._device)
        step = planned.metadata(sent)
        ends, chunks = list(accumulate(row.width for row in rows)), []
        for index, own, held in zip(long, counts, positions, strict=True):
            tokens = slice(ends[index] - rows[index].width, ends[index])
            blocks = {
                key: (step.blocks[key].blocks[index : index + 1, : -(-count // size)], held[part : part + 1])
                for part, (key, count) in enumerate(zip(read, own, strict=True))
            }
            chunks.append(Chunk(tokens, blocks))
        return FlashStep(step.slots, step.queries, step.blocks, step.is_padded, tuple(chunks))

    def attend(self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None) -> torch.Tensor:
        """Attend to the blocks of each row: one launch more for each long chunk."""
        output = super().attend(layer, queries, metadata, scaling)
        for chunk in _chunks(metadata):
            output[chunk.tokens] = self._attend_chunk(layer, queries, chunk, scaling, None)
        return output

    def attend_with_sinks(
        self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None, sinks: torch.Tensor
    ) -> torch.Tensor:
        """Attend with a learned logit of each head in the softmax."""
        output = super().attend_with_sinks(layer, queries, metadata, scaling, sinks)
        for chunk in _chunks(metadata):
            output[chunk.tokens] = self._attend_chunk(layer, queries, chunk, scaling, sinks)
        return output

    def _attend_chunk(
        self, layer: int, queries: torch.Tensor, chunk: Chunk, scaling: float | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:  # [the chunk's tokens, heads, dim]
        placement = self._store.kv_groups.placements[layer]
        keys, values = self._store.of(layer)
        blocks, positions = chunk.blocks[placement.table, placement.window]
        window = placement.window.size
        attended, _ = self._flash(
            queries[None, chunk.tokens],
            keys,
            values,
            seqused_k=positions,
            page_table=blocks,
            softmax_scale=scaling,
            causal=True,
            window_size=(None if window is None else window - 1, None),  # positions before a query's own
            learnable_sink=sinks,
            softcap=self._caps[layer] or 0.0,
            num_splits=1,
        )
        return attended[0]


def _chunks(metadata: TritonStep) -> tuple[Chunk, ...]:
    """The step's long chunks, of which a CUDA graph has none."""
    return metadata.chunks if isinstance(metadata, FlashStep) else ()


def _positions(row: RowShape, window: AttentionWindow, size: int) -> int:
    """Positions from the first block of `size` tokens that the row reads through the window to its last token."""
    _, first, _ = blocks_read(row, window, size)
    return row.end - first * size


def _library(device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The library's attention over blocks. Raises `BackendUnavailable` without it, and on a GPU that it is not for."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major not in _GENERATIONS:
            known = ", ".join(map(str, _GENERATIONS))
            raise BackendUnavailable(f"it does not run on compute capability {major}.{minor}, only on {known}")
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        problem = f"the package flash-attn-4 is not installed ({error}); run `pip install 'pilotfish[flash]'`"
        raise BackendUnavailable(problem) from error
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = flash_attn_varlen_func
    return function
