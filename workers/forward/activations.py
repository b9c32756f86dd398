"""Activation functions on CPU whose results for a row do not depend on the other rows."""

from __future__ import annotations

import torch
from torch import nn

from workers.forward.weights.experts import gated_rows

_NAMES = ("act", "act_fn", "activation", "activation_fn", "gelu_impl")
_PACKAGES = ("torch.nn.modules.activation", "transformers.activations")


class RowwiseActivation(nn.Module):
    """Applies a function of single numbers to rows. Compiled code applies it as the compiler chooses."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[…, numbers]` → the same shape."""
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            output: torch.Tensor = self.function(x)
            return output
        return gated_rows(self.function, x.reshape(-1, x.shape[-1]), x.shape[-1]).view(x.shape)


def replace_activations(model: nn.Module) -> None:
    """Replace the activation functions of a model whose weights are on CPU."""
    if not all(parameter.is_cpu for parameter in model.parameters()):
        return
    for parent in list(model.modules()):
        for name in _NAMES:
            function = getattr(parent, name, None)
            if isinstance(function, nn.Module) and _is_plain(function):
                setattr(parent, name, RowwiseActivation(function))


def _is_plain(function: nn.Module) -> bool:
    """Whether it is a function of single numbers, without weights."""
    return type(function).__module__ in _PACKAGES and not any(True for _ in function.parameters())
