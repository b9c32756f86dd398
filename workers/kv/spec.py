"""The properties of a model that determine its KV pool: shapes, data type and device of the keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.kv.state_slots import StateShape


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of the keys and values that one layer stores per token on this rank."""

    kv_heads: int
    head_dim: int
    """Numbers of a key, or of a value if these are wider: the narrower of both are padded with zeros."""
    window: int | None = None
    """Number of positions that a token sees, itself included; `None` means all of them."""
    heads_per_kv: int = 1
    """Query heads that share one KV head."""
    soft_cap: float | None = None
    """Bound of the products of queries and keys: `cap * tanh(product / cap)`; `None`: they have none."""
    has_learned_sinks: bool = False
    """Whether each head has a learned logit that takes a share of the softmax."""
    latent_dim: int | None = None
    """Numbers of a value that are the first ones of its key, and are stored once, with it; `None`: values are stored
    by themselves, as wide as keys."""
    alibi_slopes: tuple[float, ...] | None = None
    """Attention with linear biases (Press et al. 2022): each query head adds its slope times (key position - query
    position) to the scaled products; `None`: they have no biases."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def records(self) -> int:
        """What is stored of a token: a key and a value, or one record for both."""
        return 2 if self.latent_dim is None else 1


TOKENS_ALONE = LayerShape(1, 1)
"""What a model of recurrent layers alone has for attention layers: blocks that nothing is written to still count its
tokens, and name the prefixes whose states are kept."""


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """One model's requirements for its paged KV cache on this rank."""

    layers: tuple[LayerShape, ...]
    max_context_len: int
    """Longest sequence, in tokens."""
    dtype: torch.dtype
    device: torch.device
    tensor_parallel: int = 1
    """Ranks that hold the same block tables and call the pool in the same order."""
    scratch_blocks: int = 0
    """Blocks beyond the pool's own that no sequence may hold."""
    has_sources: bool = False
    """Whether tables hold sources as well, which all layers read whole: no block leaves a window."""
    states: tuple[StateShape, ...] = ()
    """The states of recurrent layers, which each sequence has besides its blocks."""
    reserved_bytes: int = 0
    """Bytes of the device that a pool leaves before it takes its share of the free memory."""
    step_token_bytes: int = 0
    """Bytes that it leaves for each token of the largest step as well."""
