"""Functions of single numbers on CPU whose results for a row do not depend on the other rows.

torch computes what fills no vector, at the end of a tensor or of a thread's part, by other code with other last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from workers.forward.weights.experts import gated_rows

_NAMES = ("act", "act_fn", "activation", "activation_fn", "gelu_impl")
_PACKAGES = ("torch.nn.modules.activation", "transformers.activations")
_FUNCTIONS = {
    torch.sigmoid: "sigmoid",
    torch.Tensor.sigmoid: "sigmoid",
    torch.special.expit: "expit",
    functional.silu: "silu",
    functional.softplus: "softplus",
    functional.gelu: "gelu",
    functional.mish: "mish",
    functional.elu: "elu",
    functional.selu: "selu",
}
"""Functions with other code for the end of a tensor, and what a caller's code calls them."""


def rowwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What a function of single numbers makes of `x` `[…, numbers]` on CPU, by the same code for all of them."""
    return gated_rows(function, x.reshape(-1, x.shape[-1]), x.shape[-1]).view(x.shape)


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
        return rowwise(self.function, x)


class _RowwiseFunctions(TorchFunctionMode):
    """Computes `_FUNCTIONS` of tensors on CPU row by row."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if function not in _FUNCTIONS or not _is_on_cpu(args) or options.get("inplace"):
            return function(*args, **options)
        x, *others = args
        return rowwise(lambda part: function(part, *others, **options), x)


_ROWWISE = _RowwiseFunctions()


def replace_activations(model: nn.Module) -> None:
    """Make activation functions of a model whose weights are on CPU compute row by row.

    Modules of functions are replaced. Modules whose own code calls one of `_FUNCTIONS`, as routers do, get hooks.
    """
    if not all(parameter.is_cpu for parameter in model.parameters()):
        return
    for parent in list(model.modules()):
        for name in _NAMES:
            function = getattr(parent, name, None)
            if isinstance(function, nn.Module) and _is_plain(function):
                setattr(parent, name, RowwiseActivation(function))
        if _calls_functions(type(parent)):
            parent.register_forward_pre_hook(_begin)
            parent.register_forward_hook(_end, always_call=True)


def _begin(module: nn.Module, args: Any) -> None:  # noqa: ARG001 - the hook's signature
    if not torch.compiler.is_compiling():
        _ROWWISE.__enter__()  # type: ignore[no-untyped-call]


def _end(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - the hook's signature
    if not torch.compiler.is_compiling():
        _ROWWISE.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _is_on_cpu(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu" and args[0].numel() > 1


def _is_plain(function: nn.Module) -> bool:
    """Whether it is a function of single numbers, without weights."""
    return type(function).__module__ in _PACKAGES and not any(True for _ in function.parameters())


def _calls_functions(kind: type[nn.Module]) -> bool:
    """Whether methods of a class of `transformers` call one of `_FUNCTIONS`."""
    if not kind.__module__.startswith("transformers.models."):
        return False
    methods = [one for base in kind.__mro__ if base is not nn.Module for one in vars(base).values()]
    names = {name for one in methods if isinstance(one, FunctionType) for name in _names(one.__code__)}
    return not names.isdisjoint(_FUNCTIONS.values())


def _names(code: CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
