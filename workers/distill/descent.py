"""What a step of all trainings shares: the learning rate, and how a loss changes parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def learning_rate(highest: float, warm_up: float, done: float) -> float:
    """The rate at the finished share `done`: a linear rise, then a cosine to 0 (Loshchilov & Hutter 2017).

    `warm_up` is the share of the training in which it rises to `highest`.
    """
    if done < warm_up:
        return highest * max(done / warm_up, 0.01)
    share = min(1.0, (done - warm_up) / max(1e-9, 1 - warm_up))
    return highest * 0.5 * (1 + math.cos(math.pi * share))


def descend(
    loss: Tensor, parameters: Iterable[Tensor], optimizers: Sequence[torch.optim.Optimizer], gradient_norm: float
) -> None:
    """Change parameters by the gradients of a loss, which are scaled down to `gradient_norm` and freed afterwards."""
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(parameters, gradient_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
