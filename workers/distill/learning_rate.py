"""The schedule of the learning rate that all trainings share."""

from __future__ import annotations

import math


def learning_rate(highest: float, warm_up: float, done: float) -> float:
    """The rate at the finished share `done`: a linear rise, then a cosine to 0 (Loshchilov & Hutter 2017).

    `warm_up` is the share of the training in which it rises to `highest`.
    """
    if done < warm_up:
        return highest * max(done / warm_up, 0.01)
    share = min(1.0, (done - warm_up) / max(1e-9, 1 - warm_up))
    return highest * 0.5 * (1 + math.cos(math.pi * share))
