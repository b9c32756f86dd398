"""The target writes many texts at once on one device: large batches, keys and values kept, finished rows dropped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

Tokens = tuple[int, ...]

_ATTENTION = "pilotfish_grouped"
_LOOK_EVERY = 16
"""Steps after which finished rows are looked for, which waits for the device."""
_LEAST_RUNNING = 0.75
"""Share of rows below which finished ones are dropped."""


@dataclass(frozen=True, slots=True)
class WritingPlan:
    """Settings of one batch."""

    most_tokens: int
    """Most tokens of one continuation."""
    stops: tuple[int, ...]
    """Tokens that end a continuation, and are a part of it."""
    seed: int
    floor: float = 0.0
    """Tokens less probable than this share of the most probable one are never drawn."""
    ends: float | None = None
    """When all rows end, on the clock of `time.monotonic`; `None`: no limit."""


def continuations(
    target: Any, prompts: Sequence[Tokens], temperatures: Sequence[float], plan: WritingPlan
) -> list[Tokens]:
    """What a `transformers` model writes after each prompt; temperature 0 is greedy.

    Texts depend on the other rows of the batch: the rows share one generator.
    """
    device = target.get_output_embeddings().weight.device
    tokens, mask = _left_padded(prompts, device)
    heat = torch.tensor(temperatures, device=device, dtype=torch.float32)
    stops = torch.tensor(plan.stops, device=device)
    generator = torch.Generator(device).manual_seed(plan.seed)
    written = torch.full((len(prompts), plan.most_tokens), -1, dtype=torch.int32, device=device)
    rows = torch.arange(len(prompts), device=device)
    is_done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache = DynamicCache(config=target.config)
    before = target.config._attn_implementation
    target.set_attn_implementation(_ATTENTION)
    try:
        with torch.inference_mode():
            for step in range(plan.most_tokens):
                places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
                logits = target(
                    input_ids=tokens,
                    attention_mask=mask,
                    position_ids=places,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
                drawn = _drawn(logits.float(), heat, plan.floor, generator)
                written[rows, step] = torch.where(is_done, -1, drawn).int()
                is_done |= torch.isin(drawn, stops)
                tokens, mask = drawn.unsqueeze(1), nn.functional.pad(mask, (0, 1), value=1)
                if step % _LOOK_EVERY:
                    continue
                running = (~is_done).nonzero().flatten()
                if not len(running) or (plan.ends is not None and time.monotonic() >= plan.ends):
                    break
                if len(running) < _LEAST_RUNNING * len(rows):
                    cache.batch_select_indices(running)
                    tokens, mask, rows, heat = tokens[running], mask[running], rows[running], heat[running]
                    is_done = is_done[running]
    finally:
        target.set_attn_implementation(before)
    return [tuple(token for token in row if token >= 0) for row in written.tolist()]


def _left_padded(prompts: Sequence[Tokens], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length], padded with 0 on the left, and where they are tokens, both int64."""
    length = max(map(len, prompts))
    padded = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(1)
    mask = (torch.arange(length) >= length - lengths).long()
    return torch.tensor(padded).to(device), mask.to(device)


def _drawn(logits: Tensor, temperatures: Tensor, floor: float, generator: torch.Generator) -> Tensor:
    """A token of each row [rows], by the Gumbel-max trick. `logits` [rows, vocabulary] are float32."""
    heat = temperatures.unsqueeze(1)
    scores = logits / heat.clamp(min=1e-6)
    if floor:
        lowest = scores.amax(dim=1, keepdim=True) + torch.log(torch.tensor(floor, device=logits.device))
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    noise = torch.empty_like(scores).exponential_(generator=generator).log_()
    return torch.where(temperatures > 0, (scores - noise).argmax(dim=1), logits.argmax(dim=1))


def _grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attention of one token of each row without copies of the keys for each query head."""
    rows, heads, count, width = query.shape
    if count > 1 or attention_mask is None:
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            # Padding before a prompt sees all of it: where a row sees nothing, some kernels compute no number.
            attention_mask = attention_mask | ~attention_mask.any(dim=-1, keepdim=True)
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return found
    kv_heads = key.shape[1]
    grouped = query.view(rows, kv_heads, heads // kv_heads, width)
    scores = grouped @ key.transpose(-1, -2) * settings.get("scaling", width**-0.5)
    scores = (
        scores.masked_fill(~attention_mask, -torch.inf)
        if attention_mask.dtype == torch.bool
        else scores + attention_mask
    )
    mixed = scores.float().softmax(dim=-1).to(value.dtype) @ value
    return mixed.view(rows, 1, heads, width), None


AttentionInterface.register(_ATTENTION, _grouped_attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)
