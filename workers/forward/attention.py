"""One attention function for every model family: paged, ragged, with tree masks and windows.

`transformers` calls attention through a registry. The function registered here ignores its mask argument. The runner
plans each step with an attention backend, which knows where each new token's key and value are stored and which stored
ones the token sees. Prompt chunks, single tokens, chains and trees are rows of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from cluster.core.errors import ModelLoadError
from workers.forward.backends.base import AttentionBackend
from workers.forward.operators import define

ATTENTION_NAME = "pilotfish_paged"
READS_SOURCE = "reads_source"
"""Attribute that marks the cross-attention modules of an encoder-decoder model."""

Probed = tuple[int, int, int | None, int]
"""One layer's KV heads, head dimension, window, and query heads per KV head."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step as an attention backend planned it."""

    backend: AttentionBackend[Any]
    metadata: Any
    """What the backend derived from the step's rows."""
    sources: Any = None
    """What the backend derived from the rows' sources, for the cross-attention of an encoder-decoder model."""


class PagedAttention:
    """Shared by a model's attention modules. The runner sets `step` for each forward pass."""

    def __init__(self) -> None:
        self.step: StepPlan | None = None
        self.probe: dict[int, Probed] | None = None
        """While set, no attention is computed. Each layer records its shape here."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, dim]
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Returns `[1, tokens, heads, dim]`. `window` is only recorded by the probe; the pool's groups apply it."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        reads_source = READS_SOURCE in vars(module)
        if self.probe is not None:
            self._record(layer, (key.shape[1], key.shape[3], window, query.shape[1] // key.shape[1]), reads_source)
            return torch.zeros_like(query).transpose(1, 2)
        if self.step is None:
            raise RuntimeError("a paged model was called outside its runner")
        backend, metadata = self.step.backend, self.step.sources if reads_source else self.step.metadata
        if not reads_source:
            backend.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), metadata)
        return backend.attend(layer, query[0].transpose(0, 1), metadata, scaling)[None]

    def _record(self, layer: int, shape: Probed, reads_source: bool) -> None:
        """Record the shape of a layer's self-attention, which its cross-attention must have too."""
        if self.probe is None:
            return
        if reads_source and self.probe.get(layer) != shape:
            raise ModelLoadError(
                f"decoder layer {layer}: its cross-attention has the shape {shape}, which is refused; it must be that "
                f"of its self-attention, {self.probe.get(layer)}"
            )
        self.probe[layer] = shape


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the layout replaces it
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - never at inference
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function with the signature that `transformers` expects."""
    if softcap is not None or s_aux is not None:
        # The probe pass raises this when the model is loaded.
        raise ModelLoadError("a model whose attention has soft-capped logits or learned sinks is not supported")
    if torch.compiler.is_compiling():
        handle = module.attention_handle
        return torch.ops.pilotfish.attend(query, key, value, handle, scaling, sliding_window), None
    paged = module.paged_attention
    if not isinstance(paged, PagedAttention):
        raise TypeError("the attention module was not bound by bind()")
    return paged.attend(module, query, key, value, scaling, sliding_window), None


# The compiler sees attention as one opaque operator, since its arguments do not include the pool and the layout.
# A handle in a tensor identifies the module, so that one compiled layer serves all layers.
_bound: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_handles = count()


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    handle: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    module = _bound[int(handle)]
    output: torch.Tensor = module.paged_attention.attend(module, query, key, value, scaling, window)  # type: ignore[operator, union-attr]
    return output


def _attend_shape(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], query.shape[3]))


define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor handle, float? scaling, int? window) -> Tensor",
    _attend,
    _attend_shape,
)


def register() -> None:
    """Register the function with `transformers` as `ATTENTION_NAME`."""
    from transformers import AttentionInterface  # only a process that loads modules needs it

    AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


def bind(module: nn.Module) -> PagedAttention:
    """Give all attention modules (those with a `layer_idx`) one shared `PagedAttention`."""
    paged = PagedAttention()
    for part in module.modules():
        if hasattr(part, "layer_idx"):
            part.paged_attention = paged  # type: ignore[assignment]
            handle = next(_handles)
            _bound[handle] = part
            part.register_buffer("attention_handle", torch.tensor(handle), persistent=False)
    return paged
