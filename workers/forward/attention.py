"""One attention function for every model family: paged, ragged, with tree masks and windows.

`transformers` calls attention through a registry. The function registered here reads the masks of a model when it is
loaded, and then ignores them. The runner plans each step with an attention backend, which knows where each new token's
key and value are stored and which stored ones the token sees. Prompt chunks, single tokens, chains and trees are rows
of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from cluster.core.errors import ModelLoadError
from workers.forward.backends.base import AttentionBackend
from workers.forward.latent_heads import latent_heads
from workers.forward.operators import define

ATTENTION_NAME = "pilotfish_paged"
READS_SOURCE = "reads_source"
"""Attribute that marks the cross-attention modules of an encoder-decoder model."""


class UnsupportedModel(ModelLoadError):
    """A model that would be computed wrong. The message says why, without the model's name."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one call of attention, as the probe reads them."""

    query: torch.Tensor  # [1, heads, tokens, dim]
    key: torch.Tensor  # [1, kv_heads, tokens, dim]
    value: torch.Tensor
    mask: Any
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    alibi_slopes: tuple[float, ...] | None
    others: dict[str, Any]
    """Arguments by name that the paged attention does not read."""


class Probe(Protocol):
    """Records what the layers of one pass ask of attention."""

    def record(self, module: nn.Module, call: AttentionCall, *, reads_source: bool) -> None:
        """Record a layer. Raises `UnsupportedModel` for what the paged attention would not compute."""


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
        self.probe: Probe | None = None
        """While set, no attention is computed. Each layer is recorded in it."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,  # [1, heads, tokens, dim]
        key: torch.Tensor,  # [1, kv_heads, tokens, dim]
        value: torch.Tensor,  # [1, kv_heads, tokens, value dim]
        scaling: float | None,
        sinks: torch.Tensor | None,  # [heads]
    ) -> torch.Tensor:
        """Returns `[1, tokens, heads, value dim]`."""
        if self.probe is not None:
            return _attend_shape(query, key, value).zero_()
        if self.step is None:
            raise RuntimeError("a paged model was called outside its runner")
        layer = int(module.kv_layer)  # type: ignore[arg-type]
        reads_source = READS_SOURCE in vars(module)
        backend, metadata = self.step.backend, self.step.sources if reads_source else self.step.metadata
        width, padded = value.shape[3], max(key.shape[3], value.shape[3])
        if width != key.shape[3] and latent_heads(module) is None:
            # Zeros change neither the products nor the values that are kept.
            scaling = key.shape[3] ** -0.5 if scaling is None else scaling
            query, key, value = (nn.functional.pad(one, (0, padded - one.shape[3])) for one in (query, key, value))
        if not reads_source:
            backend.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), metadata)
        queries = query[0].transpose(0, 1)
        if sinks is None:
            return backend.attend(layer, queries, metadata, scaling)[None, ..., :width]
        return backend.attend_with_sinks(layer, queries, metadata, scaling, sinks)[None, ..., :width]


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - never at inference
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function with the signature that `transformers` expects.

    Masks, windows, soft caps, slopes and `others` are read by the probe pass, when the model is loaded. The step's
    layout replaces the masks, and the backend knows the rest of each layer.
    """
    latents = latent_heads(module)
    if latents is not None:
        query, scaling = latents.absorb(query, scaling)
    if torch.compiler.is_compiling():
        found = torch.ops.pilotfish.attend(query, key, value, module.attention_handle, scaling, s_aux)
        return found if latents is None else latents.expand(found), None
    paged = getattr(module, "paged_attention", None)
    if not isinstance(paged, PagedAttention):
        raise UnsupportedModel(f"{type(module).__name__} attends without a layer_idx, so its keys have no place")
    if paged.probe is not None:
        has_sinks = s_aux is not None
        call = AttentionCall(
            query, key, value, attention_mask, sliding_window, softcap, has_sinks, alibi_slopes, others
        )
        paged.probe.record(module, call, reads_source=READS_SOURCE in vars(module))
    found = paged.attend(module, query, key, value, scaling, s_aux)
    return found if latents is None else latents.expand(found), None


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
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    module = _bound[int(handle)]
    output: torch.Tensor = module.paged_attention.attend(module, query, key, value, scaling, sinks)  # type: ignore[operator, union-attr]
    return output.contiguous()  # as the compiler was told, whatever the strides of the query


def _attend_shape(query: torch.Tensor, _: torch.Tensor, value: torch.Tensor, *__: Any) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor handle, float? scaling, Tensor? sinks) -> Tensor",
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
            if not hasattr(part, "kv_layer"):  # a probe may have numbered it
                part.kv_layer = part.layer_idx
            handle = next(_handles)
            _bound[handle] = part
            part.register_buffer("attention_handle", torch.tensor(handle), persistent=False)
    return paged
