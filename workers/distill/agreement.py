"""Measures how often the student's most probable token is the one that the target wrote after the same text."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.distill.answers import Answer
from workers.distill.student import Student

Counts = dict[str, tuple[int, int]]
"""By category: the positions at which student and target agree, and all positions."""


def agreement(
    student: Student, answers: Sequence[Answer], batch_tokens: int, max_length: int, autocast: bool
) -> Counts:
    """Count the positions at which student and target agree, and all positions, by category (`""` for none).

    Use greedy answers, since the student's most probable token is compared.
    """
    found: Counts = {}
    was_training = student.training
    student.eval()
    device = student.head.device
    for category in sorted({answer.category for answer in answers}):
        rows = [answer for answer in answers if answer.category == category]
        agreed = total = 0
        size = max(1, batch_tokens // max_length)
        for start in range(0, len(rows), size):
            batch = student.batch(rows[start : start + size], max_length).to(device)
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                predicted = student.tokens_of(student.logits(student.states(batch)).argmax(dim=-1))
            agreed += int((predicted == batch.labels).sum())
            total += len(batch.labels)
        found[category] = (agreed, total)
    student.train(was_training)
    return found


def share(counts: Counts) -> float:
    """The share of all categories together, between 0 and 1; 0 where nothing was counted."""
    agreed = sum(count for count, _ in counts.values())
    return agreed / max(1, sum(total for _, total in counts.values()))
