"""The most probable tokens of each row of logits, found without sorting the vocabulary."""

from __future__ import annotations

import torch

_BLOCK = 64
"""Tokens whose largest logit is found first. The best tokens are in the blocks with the largest ones."""


def most_probable(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens with the `count` largest logits `[rows, vocabulary]`, best first: indices `[rows, count]`.

    `count` is at most the size of the vocabulary. Which of equal logits comes first is not defined.
    """
    rows, size = logits.shape
    blocks = size // _BLOCK
    if logits.device.type != "cpu" or blocks <= count:
        return logits.topk(count).indices
    whole = logits[:, : blocks * _BLOCK].reshape(rows, blocks, _BLOCK)
    best = whole.amax(-1).topk(count, sorted=False).indices  # [rows, count]
    offsets = torch.arange(_BLOCK, device=logits.device)
    tokens = (best.unsqueeze(-1) * _BLOCK + offsets).flatten(1)
    found = whole.gather(1, best.unsqueeze(-1).expand(-1, -1, _BLOCK)).flatten(1)
    if size > blocks * _BLOCK:  # the tokens after the last whole block
        rest = torch.arange(blocks * _BLOCK, size, device=logits.device)
        tokens = torch.cat([tokens, rest.expand(rows, -1)], dim=1)
        found = torch.cat([found, logits[:, blocks * _BLOCK :]], dim=1)
    chosen: torch.Tensor = tokens.gather(1, found.topk(count).indices)
    return chosen
