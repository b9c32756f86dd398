"""Forward passes through a part of a model: its first layers only, or all layers without some of their parts.

A draft that the target computes with a part of its own layers needs no weights of its own: early exit (LayerSkip,
Elhoushi et al. 2024) and skipped layers (Draft & Verify, Zhang et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cluster.core.errors import ConfigurationError
from workers.forward.layer_lists import decoder_layers, decoder_list

SKIP_ATTENTION, SKIP_MLP = 1, 2
_ATTENTION_NAMES = ("self_attn", "attn")
_MLP_NAMES = ("mlp", "fc2")  # OPT's second projection: without its output, its layer adds nothing
_NORM_NAMES = ("norm", "final_layer_norm", "ln_f")
_WITH_SCORES = {"GptOssMLP"}
"""Classes of feed-forward networks that return the scores of their router, too."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialPass:
    """Which parts of the model a pass computes. Layers are numbered from 0."""

    layers: int | None = None
    """The pass ends after this many layers; `None`: it runs them all."""
    skip_attention: frozenset[int] = frozenset()
    """Layers that add nothing of their attention to the residual stream. They store no keys and values."""
    skip_mlp: frozenset[int] = frozenset()
    """Layers that add nothing of their feed-forward network to the residual stream."""
    exit_norm: torch.Tensor | None = None
    """`[hidden]` replaces the weight of the final norm, which is trained for the last layer's output."""

    def check(self, layers: int, hidden: int, device: torch.device) -> None:
        """Raise `ConfigurationError` if a model of `layers` layers and `hidden` numbers per token has no such part."""
        if self.layers is not None and not 1 <= self.layers <= layers:
            raise ConfigurationError(f"layers: {self.layers} is refused; it must be between 1 and {layers}")
        for name, skipped in (("skip_attention", self.skip_attention), ("skip_mlp", self.skip_mlp)):
            wrong = [layer for layer in sorted(skipped) if not 0 <= layer < layers]
            if wrong:
                raise ConfigurationError(f"{name}: {wrong[0]} is refused; it must be between 0 and {layers - 1}")
        if self.exit_norm is not None and self.exit_norm.shape != (hidden,):
            raise ConfigurationError(
                f"exit_norm: the shape {tuple(self.exit_norm.shape)} is refused; it must be ({hidden},)"
            )
        if self.exit_norm is not None and self.exit_norm.device != device:
            raise ConfigurationError(f"exit_norm: the device {self.exit_norm.device} is refused; it must be {device}")

    def skipped_parts(self, layers: int) -> list[int]:
        """For each layer the sum of `SKIP_ATTENTION` and `SKIP_MLP` where the part is skipped; empty if none is."""
        if not self.skip_attention and not self.skip_mlp:
            return []
        return [
            SKIP_ATTENTION * (layer in self.skip_attention) + SKIP_MLP * (layer in self.skip_mlp)
            for layer in range(layers)
        ]


WHOLE = PartialPass()


@contextmanager
def only_parts(module: nn.Module, partial: PartialPass) -> Iterator[None]:
    """Inside, a model of `transformers` computes these parts only. Raises `ConfigurationError` if it has none such."""
    if partial is WHOLE:
        yield
        return
    with ExitStack() as stack:
        layers = list(decoder_layers(module))
        for index, skipped in enumerate(partial.skipped_parts(len(layers))):
            if skipped:
                stack.enter_context(_without_parts(layers[index], skipped))
        if partial.layers is not None:
            parent, name = decoder_list(module)
            stack.enter_context(_replaced(parent, name, nn.ModuleList(layers[: partial.layers])))
        if partial.exit_norm is not None:
            norm = _part(decoder_list(module)[0], _NORM_NAMES)
            weight = nn.Parameter(partial.exit_norm.to(norm.weight.dtype), requires_grad=False)  # type: ignore[arg-type]
            stack.enter_context(_replaced(norm, "weight", weight))
        yield


@contextmanager
def _without_parts(layer: nn.Module, skipped: int) -> Iterator[None]:
    """Inside, the layer runs uncompiled, because compiled code holds all of its parts."""

    def no_attention(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None

    def no_mlp(hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, None]:
        nothing = hidden_states.new_zeros((*hidden_states.shape[:-1], width or hidden_states.shape[-1]))
        return (nothing, None) if type(mlp).__name__ in _WITH_SCORES else nothing

    with ExitStack() as stack:
        stack.enter_context(_replaced(layer, "forward", type(layer).forward.__get__(layer)))
        if skipped & SKIP_ATTENTION:
            stack.enter_context(_replaced(_part(layer, _ATTENTION_NAMES), "forward", no_attention))
        if skipped & SKIP_MLP:
            mlp = _part(layer, _MLP_NAMES)
            width: int | None = getattr(mlp, "out_features", None)
            stack.enter_context(_replaced(mlp, "forward", no_mlp))
        yield


def _part(parent: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """The child with one of these names. Raises `ConfigurationError` if there is none."""
    for name in names:
        child = getattr(parent, name, None)
        if isinstance(child, nn.Module):
            return child
    raise ConfigurationError(f"{type(parent).__name__} has none of the parts {', '.join(names)}")


@contextmanager
def _replaced(owner: nn.Module, name: str, value: object) -> Iterator[None]:
    """Inside, the attribute of the module has this value."""
    missing = object()
    before = vars(owner).get(name, missing) if name == "forward" else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
