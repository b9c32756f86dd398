"""A model in memory, and what the rest of the data plane must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from workers.forward.native.decoder import NativeDecoder


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token on this rank."""

    kv_heads: int
    head_dim: int
    window: int | None = None
    """A token sees this many positions, itself included; `None` is all of them."""
    heads_per_kv: int = 1
    """Query heads that share one KV head."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model whose attention is paged."""

    module: PreTrainedModel
    name: str
    layers: tuple[LayerShape, ...]
    vocabulary_size: int
    """Tokens in the whole vocabulary."""
    vocabulary_offset: int
    """First token of this rank's part of the logits; 0 when they are whole."""
    max_context_len: int
    """Longest sequence, in tokens."""
    eos_token_ids: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    code_directory: str | None = None
    """Where code made for this machine is kept between starts."""
    tensor_parallel: int = 1
    native: NativeDecoder | None = None
    """The layers and the head in the kernels' form; `module` is without them then."""
    replays: bool = False
    """Whether passes of recurring sizes are recorded and replayed."""
    vocabulary: torch.Tensor | None = None
    """The tokens of the logits' columns, int64, rising, where a draft's head knows only those; `None`: all."""
