"""A short training of heads on texts that were just served, whose hidden states are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.heads import MedusaHeads


@dataclass(frozen=True, slots=True)
class ServedText:
    """Committed tokens, and the target's hidden states at consecutive positions of them."""

    tokens: Sequence[int]
    first: int
    """Position of the first row of `hidden`."""
    hidden: Tensor
    """[positions, hidden size] The residual stream after the last layer."""


@dataclass(frozen=True, slots=True)
class OnlinePlan:
    """Settings of one short training."""

    steps: int = 200
    positions: int = 256
    """Positions of a batch, drawn at random."""
    learning_rate: float = 1e-3
    decay: float = 0.8
    """Weight of a depth relative to the depth before."""
    seed: int = 0


def train_online(module: MedusaHeads, ends: TargetEnds, texts: Sequence[ServedText], plan: OnlinePlan) -> None:
    """Train the heads in place by the cross entropy of the committed tokens. The selector stays as it is.

    Raises `ValueError` without a position to learn from, and `FloatingPointError` if the loss is not finite.
    """
    depths = module.shape.depths
    hidden, last, following = (
        torch.cat(parts) for parts in zip(*(_windows(text, depths) for text in texts), strict=True)
    )
    if not len(hidden):
        raise ValueError("texts: none has a position to learn from")
    targets = torch.where(following < 0, -1, ends.row_of[following.clamp(min=0)])  # [positions, depths]
    parameters = [value for name, value in module.named_parameters() if not name.startswith("selector.")]
    for value in parameters:
        value.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=plan.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(plan.seed)
    weights = plan.decay ** torch.arange(depths, dtype=torch.float32)
    for step in range(plan.steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * (1 - step / plan.steps)
        chosen = torch.randint(len(hidden), (min(plan.positions, len(hidden)),), generator=generator)
        found = module(ends.normalised(hidden[chosen]).float(), ends.embed(last[chosen]).float())
        known = targets[chosen] >= 0
        if not bool(known.any()):
            continue
        losses = cross_entropy(ends.logits(found[known]), targets[chosen][known], reduction="none")
        shares = weights.expand_as(known)[known]
        loss = (losses * shares).sum() / shares.sum()
        if not bool(loss.isfinite()):
            raise FloatingPointError(f"the loss of step {step} is {float(loss)}")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    module.requires_grad_(False)


def _windows(text: ServedText, depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [positions, hidden size], the tokens after them, and those after these [positions, depths].

    The tokens after the end are -1.
    """
    tokens = torch.tensor([*text.tokens, *([-1] * depths)])
    most = min(len(text.hidden), len(text.tokens) - 2 - text.first)
    positions = text.first + torch.arange(max(0, most))
    places = positions.unsqueeze(1) + 2 + torch.arange(depths)
    return text.hidden[: len(positions)], tokens[positions + 1], tokens[places]
