"""Texts with the target's hidden states, computed once and kept on the device of the training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from workers.distill.answers import Answer
from workers.distill.examples import fill_batches, most_alternatives, successors, weights_of
from workers.distill.stored_target import StoredTarget, read_states
from workers.model.target_ends import logit_factor

_CHUNK = 4096
"""Positions whose logits over the target's whole vocabulary are computed at once."""


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Where the texts of a row are that has several. All are [rows, length] int64, on the CPU."""

    places: Tensor
    """Position within the own text; 0 where there is none."""
    first: Tensor
    """The position within the text whose feature a draft begins from: the last one of the prompt."""
    left: Tensor
    """Tokens of the text that follow; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Rows of prompt and answer, padded on the right."""

    tokens: Tensor
    """[rows, length] int64, padded with 0."""
    lengths: Tensor
    """[rows] Tokens of each row, on the CPU."""
    first: Tensor
    """[rows] The first position whose feature a draft begins from: the last one of the prompt. On the CPU."""
    taps: Tensor
    """[rows, length, taps x hidden size], in the type of the target."""
    final: Tensor
    """[rows, length, hidden size] The target's last hidden states, after its final norm, times its logits' factor."""
    successors: tuple[Tensor, Tensor] | None = None
    """The target's most probable next tokens and their probabilities, [rows, length, alternatives] each, int64 and
    float32, where they stand for the last hidden states; see `successors`. The weights of the losses of these tokens
    are multiplied into the probabilities."""
    packed: PackedTexts | None = None
    """Set where rows have several texts: then `lengths` are those of rows, and `first` is of no use."""


class TextStates:
    """Texts on a device. Each token takes `taps + 1` hidden states of the target's type there.

    Of several processes that train together, each has the states of its own texts, and knows the lengths of all.
    """

    def __init__(
        self,
        target: StoredTarget,
        answers: Sequence[Answer],
        *,
        max_length: int,
        batch_tokens: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Read the states of the answers of a `part` `(k, n)`: numbers k, k + n, …. All are cut to `max_length`.

        Raises `ConfigurationError` where a text's are not stored.
        """
        weight, size = target.get_output_embeddings().get_parameter("weight"), int(target.config.hidden_size)
        own = range(part[0], len(answers), part[1])
        self._allocate(answers, own, max_length, (target.width, size), weight)
        factor = logit_factor(target.config)
        for batch in by_length([self.lengths[row] for row in own], batch_tokens):
            chosen = [own[number] for number in batch]
            indices, is_token = self._places(chosen)
            states, final = read_states(target, [answers[row] for row in chosen])
            self._taps[indices[is_token]] = states[is_token]
            self._final[indices[is_token]] = final[is_token] * factor

    @classmethod
    def shown(cls, answers: Sequence[Answer], states: Callable[[Answer], Tensor]) -> TextStates:
        """Whole answers whose taps [tokens, taps x hidden size] are known as `states`, and no last hidden states.

        The target's probabilities are those that the answers have; without any, the tokens that it wrote are certain.
        """
        found = cls.__new__(cls)
        taps = [states(answer) for answer in answers]
        longest = max(len(answer.prompt) + len(answer.answer) for answer in answers)
        found._allocate(answers, range(len(answers)), longest, (taps[0].shape[1], 0), taps[0])
        torch.cat(taps, out=found._taps)
        width = most_alternatives(answers)
        known = [successors(answer, len(rows), width) for answer, rows in zip(answers, taps, strict=True)]
        weights = [weights_of(answer, 1 + len(rows))[1:] for answer, rows in zip(answers, taps, strict=True)]
        shares = torch.cat([shares for _, shares in known]) * torch.cat(weights).unsqueeze(1)
        found._successors = torch.cat([tokens for tokens, _ in known]), shares
        return found

    def _allocate(
        self, answers: Sequence[Answer], own: range, max_length: int, widths: tuple[int, int], like: Tensor
    ) -> None:
        """Store the tokens of the texts with the numbers `own`, and what is to be known of all others.

        Memory for taps and last hidden states, of these widths, is of the type and device of `like`.
        """
        rows = [(*answer.prompt, *answer.answer)[:max_length] for answer in answers]
        total = sum(len(rows[row]) for row in own)
        self.lengths = [len(row) for row in rows]
        self._prompts = [len(answer.prompt) for answer in answers]
        self._starts = dict(zip(own, accumulate((len(rows[row]) for row in own), initial=0), strict=False))
        self._tokens = torch.tensor([token for row in own for token in rows[row]], device=like.device)
        self._taps, self._final = (
            torch.empty((total, width), dtype=like.dtype, device=like.device) for width in widths
        )
        self._successors: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> int:
        """The tokens of the texts whose states are here."""
        return len(self._tokens)

    @property
    def learnable(self) -> list[int]:
        """Numbers of the texts with a token that a draft can predict, the second one of an answer, in all processes."""
        return [row for row, length in enumerate(self.lengths) if length >= self._prompts[row] + 2]

    def batch(self, rows: Sequence[int], multiple: int = 1) -> TextBatch:
        """The texts of these numbers, padded to a length that is a multiple of `multiple`."""
        indices, is_token = self._places(rows, multiple)
        known = self._successors
        return TextBatch(
            self._tokens[indices] * is_token,
            torch.tensor([self.lengths[row] for row in rows]),
            torch.tensor([self._prompts[row] - 1 for row in rows]),
            self._taps[indices],
            self._final[indices],
            None if known is None else (known[0][indices], known[1][indices]),
        )

    def packed(self, rows: Sequence[Sequence[int]], length: int) -> TextBatch:
        """Rows of `length` tokens with several texts each, after one another, given by their numbers."""
        indices, *parts = torch.zeros((4, len(rows), length), dtype=torch.long)
        places, first, left = parts
        is_token = torch.zeros((len(rows), length), dtype=torch.bool)
        for row, texts in enumerate(rows):
            begin = 0
            for text in texts:
                own, count = slice(begin, begin + self.lengths[text]), self.lengths[text]
                places[row, own] = torch.arange(count)
                indices[row, own] = self._starts[text] + places[row, own]
                first[row, own], left[row, own] = self._prompts[text] - 1, count - 1 - places[row, own]
                is_token[row, own] = True
                begin += count
        indices, chosen = indices.to(self._tokens.device), is_token.to(self._tokens.device)
        known = self._successors
        return TextBatch(
            self._tokens[indices] * chosen,
            is_token.sum(dim=1),
            torch.zeros(len(rows), dtype=torch.long),
            self._taps[indices],
            self._final[indices],
            None if known is None else (known[0][indices], known[1][indices]),
            PackedTexts(places, first, left),
        )

    def _places(self, rows: Sequence[int], multiple: int = 1) -> tuple[Tensor, Tensor]:
        """Where the tokens of rows are stored [rows, length], and where there is one; elsewhere 0."""
        device = self._tokens.device
        starts = torch.tensor([self._starts[row] for row in rows], device=device).unsqueeze(1)
        lengths = torch.tensor([self.lengths[row] for row in rows], device=device).unsqueeze(1)
        places = torch.arange(-(-max(self.lengths[row] for row in rows) // multiple) * multiple, device=device)
        is_token = places < lengths
        return (starts + places) * is_token, is_token


def lengthened(answers: Sequence[Answer], share: float, most_tokens: int, seed: int) -> list[Answer]:
    """The answers, a share of them with other texts before their prompts: as many as fit `most_tokens`.

    A head that never saw two tokens far apart would not know what to make of their distance.
    """
    draw = random.Random(seed)  # noqa: S311 - an order, not a secret
    found = list(answers)
    for number in draw.sample(range(len(found)), int(share * len(found))):
        answer = answers[number]
        before: tuple[int, ...] = ()
        own = len(answer.prompt) + len(answer.answer)
        while True:
            other = answers[draw.randrange(len(answers))]
            text = (*other.prompt, *other.answer)
            if len(before) + len(text) + own > most_tokens:
                break
            before += text
        found[number] = replace(answer, prompt=(*before, *answer.prompt))
    return found


def target_probabilities(target: Any, final: Tensor, vocabulary: Tensor) -> Tensor:
    """The target's probabilities [positions, draft vocabulary], float32, of the tokens that a draft can propose.

    `final` [positions, hidden size] are those of a `TextBatch`. A row sums to less than one: the rest are the tokens
    that cannot be proposed.
    """
    head = target.get_output_embeddings()
    with torch.inference_mode():
        found = [head(part).float().softmax(dim=-1)[:, vocabulary] for part in torch.split(final, _CHUNK)]
    return torch.cat(found)


def by_length(lengths: Sequence[int], most_tokens: int) -> Iterator[tuple[int, ...]]:
    """Numbers of texts in batches of similar length, each of at most so many tokens with padding, or one text."""
    return fill_batches(sorted(range(len(lengths)), key=lengths.__getitem__), lengths, most_tokens)
