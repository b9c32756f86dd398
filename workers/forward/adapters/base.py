"""Families of `transformers` whose attention is code of their own, made to call the paged attention.

An adapter lets the attention modules of a model make queries, keys and values as they do, and hand them to the paged
attention. In a dense pass, outside a step, the modules compute with their own code: the trial at load compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from workers.forward.attention import ATTENTION_NAME, PagedAttention, paged_attention_forward

OWN_HEADS = "own_heads"
"""Attribute of an attention module that has some of the query heads of its layer on this rank: which, as a slice."""
_BIASES = ("alibi", "position_bias", "attention_mask")


def is_paged(module: Any) -> bool:
    """Whether an attention module runs in a step or in the probe; else it runs in a dense pass."""
    paged = getattr(module, "paged_attention", None)
    return torch.compiler.is_compiling() or (
        isinstance(paged, PagedAttention) and (paged.step is not None or paged.probe is not None)
    )


def attend(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, tokens, dim]
    key: torch.Tensor,  # [1, kv_heads, tokens, dim]
    value: torch.Tensor,
    mask: Any = None,
    **options: Any,
) -> torch.Tensor:
    """The paged attention, `[1, heads, tokens, dim]`.

    The probe reads `mask` as the model made it, `None` for one that is known to be causal. `options`: `scaling`
    multiplies the products of queries and keys, `None` stands for dim ** -0.5; `sliding_window`, in tokens;
    `alibi_slopes`, see `LayerShape`.
    """
    like = value.dtype
    attended, _ = paged_attention_forward(module, query.to(like), key.to(like), value, mask, **options)
    return attended.transpose(1, 2)


def merged(attended: torch.Tensor) -> torch.Tensor:
    """`[1, heads, tokens, dim]` → `[1, tokens, heads * dim]`."""
    return attended.transpose(1, 2).flatten(2)


def alibi_slopes(heads: int, make: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]) -> tuple[float, ...]:
    """The slope of each head, from a family's own function of (mask `[1, keys]`, heads, type) → `[heads, 1, keys]`."""
    return tuple(make(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1].tolist())


def give_slopes(module: Any, slopes: tuple[float, ...]) -> None:
    """Give an attention module the slopes of the heads that it has, of those of all heads, as `alibi_slopes`.

    In a dense pass the model computes biases, and a mask of them, for all heads: of these, too, it reads its own.
    """
    own = getattr(module, OWN_HEADS, None)
    module.alibi_slopes = slopes if own is None else slopes[own]
    if own is None:
        return

    def of_own_heads(given: Any) -> Any:
        if given is None or given.dim() == 4:  # [rows, heads, queries, keys]
            return given if given is None or given.shape[1] == 1 else given[:, own]
        return given.unflatten(0, (-1, len(slopes)))[:, own].flatten(0, 1)

    def keep_own(_: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return arguments, named | {name: of_own_heads(named[name]) for name in _BIASES if name in named}

    module.register_forward_pre_hook(keep_own, with_kwargs=True)


def in_steps(module: nn.Module, method: str, paged: Callable[..., Any]) -> None:
    """Let `paged` replace a method of an attention module in steps. It gets the module and the method's arguments."""
    own = getattr(module, method)

    @wraps(own)
    def call(*arguments: Any, **named: Any) -> Any:
        return paged(module, *arguments, **named) if is_paged(module) else own(*arguments, **named)

    setattr(module, method, call)


def attention_modules(model: PreTrainedModel) -> Iterator[Any]:
    """The modules of a model whose class has a name that ends with `Attention`."""
    yield from (part for part in model.modules() if type(part).__name__.endswith("Attention"))


def accept_attention_name(config: PreTrainedConfig) -> None:
    """Let a family that looks the class of its attention up in a list of its own find its usual one by our name."""
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    modeling = {} if kind is None else vars(sys.modules[kind.__module__])
    for name, classes in modeling.items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(classes, dict) and "eager" in classes:
            classes.setdefault(ATTENTION_NAME, classes["eager"])
