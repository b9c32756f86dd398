"""Training batches made of answers: rows of similar length, padded on the right."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.distill.answers import Answer

_NEIGHBOURS = 64
"""Shuffled rows are sorted by length within this many batches. This saves padding and keeps the order random."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens, and the target's tokens and probabilities at the positions that are trained on."""

    tokens: Tensor
    """[rows, length], padded on the right with 0. Under causal attention, padding changes no earlier position."""
    selected: Tensor
    """[positions] Flat indices into rows × length of the positions before each answer token."""
    labels: Tensor
    """[positions] The token that the target wrote next."""
    leading_tokens: Tensor
    """[positions, alternatives] The target's most probable tokens; -1 where unknown."""
    leading_log_probabilities: Tensor
    """[positions, alternatives] Their log-probabilities, float32."""
    sources: tuple[tuple[int, ...], ...] = ()
    """[rows] What the encoder of an encoder-decoder model reads; empty for other models."""

    def to(self, device: torch.device) -> Batch:
        """A copy on a device."""
        return Batch(
            self.tokens.to(device),
            self.selected.to(device),
            self.labels.to(device),
            self.leading_tokens.to(device),
            self.leading_log_probabilities.to(device),
            self.sources,
        )


def make_batch(answers: Sequence[Answer], max_length: int) -> Batch:
    """One batch of answers, each cut to `max_length` tokens from its beginning."""
    rows = [(*answer.prompt, *answer.answer)[:max_length] for answer in answers]
    length = max(len(row) for row in rows)
    tokens = torch.zeros((len(rows), length), dtype=torch.long)
    alternatives = most_alternatives(answers)
    selected, labels, leading, leading_log_probabilities = [], [], [], []
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        tokens[number, : len(row)] = torch.tensor(row)
        count = max(0, len(row) - len(answer.prompt))
        first = number * length + len(answer.prompt) - 1
        selected.append(torch.arange(first, first + count))
        labels.append(torch.tensor(answer.answer[:count], dtype=torch.long))
        ids = np.full((count, alternatives), -1, np.int64)
        log_probabilities = np.full((count, alternatives), -np.inf, np.float32)
        write_leading(answer, ids, log_probabilities)
        leading.append(torch.from_numpy(ids))
        leading_log_probabilities.append(torch.from_numpy(log_probabilities))
    return Batch(
        tokens, torch.cat(selected), torch.cat(labels), torch.cat(leading), torch.cat(leading_log_probabilities)
    )


def most_alternatives(answers: Sequence[Answer]) -> int:
    """The most tokens whose probabilities are known at a position of one of these answers, at least one."""
    return max((answer.leading.tokens.shape[1] for answer in answers if answer.leading is not None), default=1)


def write_leading(answer: Answer, tokens: npt.NDArray[np.int64], log_probabilities: npt.NDArray[np.float32]) -> None:
    """Write the most probable tokens at the first positions of an answer into `[positions, alternatives]` each."""
    count = len(tokens)
    if answer.leading is None:  # only the written token is known
        tokens[:, 0], log_probabilities[:, 0] = answer.answer[:count], 0.0
    else:
        width = answer.leading.tokens.shape[1]
        tokens[:, :width] = answer.leading.tokens[:count]
        log_probabilities[:, :width] = answer.leading.log_probabilities[:count]


def weights_of(answer: Answer, length: int) -> Tensor:
    """Weights of the losses of the first tokens of prompt and answer, float32 [length]; 1 where the answer has none."""
    found = torch.ones(length)
    if answer.weights is not None:
        own = found[len(answer.prompt) : len(answer.prompt) + len(answer.weights)]
        own.copy_(torch.from_numpy(answer.weights[: len(own)]))
    return found


def successors(answer: Answer, length: int, width: int) -> tuple[Tensor, Tensor]:
    """The target's most probable tokens after each of the first tokens of prompt and answer, and their probabilities.

    Both are [length, width], int64 and float32; 0 where unknown. The token itself is certain where the answer has no
    probabilities.
    """
    ids = np.full((length, width), -1, np.int64)
    log_probabilities = np.full((length, width), -np.inf, np.float32)
    own = slice(len(answer.prompt) - 1, length - 1)
    write_leading(answer, ids[own], log_probabilities[own])
    return torch.from_numpy(ids).clamp_(min=0), torch.from_numpy(log_probabilities).exp_()


def padded(rows: Sequence[Sequence[int]], device: torch.device, padding: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids [rows, length], padded on the right, and where they are tokens, both int64."""
    tokens = torch.full((len(rows), max(map(len, rows))), padding, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    return tokens.to(device), mask.to(device)


def batches_of_epoch(
    answers: Sequence[Answer], epoch: int, seed: int, batch_tokens: int, max_length: int
) -> list[tuple[int, ...]]:
    """The indices of the answers in each batch of an epoch. The same arguments give the same batches.

    A batch has at most `batch_tokens` tokens, padding included, but at least one row.
    """
    generator = random.Random(f"{seed}:{epoch}")  # noqa: S311 - an order, not a secret
    lengths = [min(max_length, len(answer.prompt) + len(answer.answer)) for answer in answers]
    order = list(range(len(answers)))
    generator.shuffle(order)
    mean = max(1, sum(lengths) // max(1, len(lengths)))
    stretch = max(1, _NEIGHBOURS * batch_tokens // mean)
    batches: list[tuple[int, ...]] = []
    for start in range(0, len(order), stretch):
        near = sorted(order[start : start + stretch], key=lengths.__getitem__)
        batches.extend(fill_batches(near, lengths, batch_tokens))
    generator.shuffle(batches)
    return batches


def fill_batches(order: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> Iterator[tuple[int, ...]]:
    """Texts in batches of at most so many tokens with padding, or of one text. `order` has ascending lengths."""
    rows: list[int] = []
    for index in order:  # the last row is the longest
        if rows and (len(rows) + 1) * lengths[index] > batch_tokens:
            yield tuple(rows)
            rows = []
        rows.append(index)
    if rows:
        yield tuple(rows)
