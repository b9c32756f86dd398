"""Finds the layers with multi-head latent attention in a model that was read, and lets them attend over latents.

`transformers` keeps the latents of all its families with such layers in one form: `expand_kv` makes keys and values of
them, with the matrix of `kv_b_proj`. The method is replaced by one that returns the record to store, so that the
attention function gets it in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from workers.forward.latent_heads import LatentHeads, give_latent_heads, latent_heads
from workers.forward.replace_linear import own_storage

_EXPANSION = "expand_kv"
_PARTS = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_a_layernorm")
_TOLERANCE = 0.02
"""Largest difference between what a layer expands and what its matrix says, as a share of the largest number."""


@torch.inference_mode()
def attend_over_latents(model: nn.Module, directory: str | None) -> None:
    """Give every layer with latent attention its latent heads, in the model's type, whatever stores its weights.

    A layer that expands latents in another way than its matrix says stays as it is, and stores keys and values.
    `directory` keeps the compiled CPU kernels.
    """
    for part in list(model.modules()):
        if not hasattr(type(part), _EXPANSION) or not all(hasattr(part, name) for name in _PARTS):
            continue
        attention: Any = part
        like = attention.kv_a_layernorm.weight
        matrix = own_storage(attention.kv_b_proj, "none")[0].dequantized().to(like.device)
        parts = [attention.qk_nope_head_dim, attention.v_head_dim]
        keys, values = torch.split(matrix.view(-1, sum(parts), attention.kv_lora_rank), parts, dim=1)
        if not _expands_alike(attention, keys, values, like.dtype):
            continue
        typed = keys.to(like.dtype), values.to(like.dtype)
        give_latent_heads(attention, LatentHeads(*typed, attention.qk_rope_head_dim, directory))
        attention.expand_kv = _record


def _record(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is stored of each token, `[1, 1, tokens, latent + rotary]`, and the part that is its value."""
    return torch.cat((latent, rotated), dim=-1), latent


def _expands_alike(attention: Any, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the module expands a random latent to what its matrices say: the keys, their rotated parts, the values.

    On a device without values there is nothing to compare.
    """
    if keys.is_meta or isinstance(keys, torch._subclasses.fake_tensor.FakeTensor):
        return True
    generator = torch.Generator().manual_seed(0)
    latent, rotated = (
        torch.randn((1, 1, 2, width), generator=generator).to(keys.device, dtype)
        for width in (attention.kv_lora_rank, attention.qk_rope_head_dim)
    )
    found = torch.cat(attention.expand_kv(latent, rotated), dim=-1).float()[0]  # [heads, tokens, …]
    plain, value = (torch.einsum("tl,hol->hto", latent[0, 0].float(), matrix) for matrix in (keys, values))
    if found.shape[0] != plain.shape[0]:
        return False
    expected = torch.cat((plain, rotated[0].float().expand(len(plain), -1, -1), value), dim=-1)
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= _TOLERANCE * expected.abs().max().clamp(min=1e-6)
    )


@contextmanager
def expanded(model: nn.Module) -> Iterator[None]:
    """Inside, the layers expand latents to keys and values as the family's own code does."""
    changed: list[Any] = [part for part in model.modules() if latent_heads(part) is not None]
    for part in changed:
        del part.expand_kv
    try:
        yield
    finally:
        for part in changed:
            part.expand_kv = _record


def drop_expansions(model: nn.Module) -> None:
    """Free the matrices that expand latents, which nothing reads any more outside of `expanded`."""
    for part in model.modules():
        if latent_heads(part) is not None:
            part.kv_b_proj = None  # type: ignore[assignment]
