"""Texts side by side in rows of one length, with the target's hidden states and probabilities, on its device."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.dspark.module import Blocks
from workers.distill.eagle3.states import by_length
from workers.distill.examples import most_alternatives, successors, weights_of
from workers.distill.peers import ALONE, Peers
from workers.distill.stored_target import StoredTarget, read_states
from workers.model.target_ends import logit_factor

_LEADING = 64
"""Tokens whose probabilities are stored for a position: the most probable ones."""
_CHUNK = 4096
"""Positions whose logits over the target's whole vocabulary are computed at once."""
_BATCH_TOKENS = 16384
"""Tokens whose states are read at once, padding included."""
_SCALE_TOKENS = 1 << 16
"""About how many tokens the scale of taps is computed from."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What slots should predict."""

    tokens: Tensor
    """[..., leading] int64: the target's most probable tokens."""
    probabilities: Tensor
    """[..., leading] float32: their probabilities."""
    following: Tensor
    """[...] int64: the token that the text has."""
    is_text: Tensor
    """[...] Whether the text has such a token."""
    weights: Tensor | None = None
    """[...] float32: weights of the losses; `None`: all are 1."""


class _Placed(NamedTuple):
    """A text in a row."""

    answer: Answer
    tokens: tuple[int, ...]
    """Tokens of prompt and answer, cut to the length of a row."""
    place: int
    """Where its first token is, among the tokens of all rows after one another."""


class TextRows:
    """Texts packed into rows, and blocks of them.

    A token takes the space of its taps, and six bytes for each of its most probable successors that are stored.
    """

    def __init__(
        self,
        target: StoredTarget,
        answers: Sequence[Answer],
        *,
        length: int,
        temperature: float = 1.0,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Read the states of all answers, each cut to `length` tokens, the size of a row.

        `part` (i, n) is the process i of n that has the same answers: it reads every n-th row alone, from row i.

        The target's probabilities are those at `temperature`. Raises `ConfigurationError` without a text whose answer
        has two tokens, and where a text's states are not stored.
        """
        head = target.get_output_embeddings().get_parameter("weight")
        width, vocabulary = target.width, int(target.config.vocab_size)
        heat = temperature / logit_factor(target.config)
        placed = self._place(answers, length, width, vocabulary, head, part)
        own = [one for one in placed if one.place // length % part[1] == part[0]]
        for batch in by_length([len(one.tokens) for one in own], _BATCH_TOKENS):
            self._read(target, [own[index] for index in batch], heat)

    @classmethod
    def shown(cls, answers: Sequence[Answer], states: Callable[[Answer], Tensor], *, length: int) -> TextRows:
        """Rows of answers whose taps [tokens, taps x hidden size] are known as `states`, each cut to `length` tokens.

        The target's probabilities are those that the answers have; without any, the tokens that it wrote are certain.
        Raises `ConfigurationError` without a text whose answer has two tokens.
        """
        found = cls.__new__(cls)
        like, width = states(answers[0]) if answers else torch.empty(0, 0), most_alternatives(answers)
        placed = found._place(answers, length, like.shape[1], width, like, (0, 1))
        weights = torch.ones(len(found._tokens), device=like.device)
        for one in placed:
            count = len(one.tokens)
            place = slice(one.place, one.place + count)
            found._taps[place] = states(one.answer)[:count]
            leading, shares = (part[:, :_LEADING] for part in successors(one.answer, count, width))
            found._leading[place], found._shares[place] = leading.int(), shares.half()
            weights[one.place : one.place + count - 1] = weights_of(one.answer, count)[1:]
        found._weights = weights
        return found

    @classmethod
    def empty(
        cls, size: tuple[int, int], width: int, vocabulary: int, device: torch.device, dtype: torch.dtype
    ) -> TextRows:
        """Rows without texts, of the memory that they take with texts.

        `size` is the number of rows and their length, `width` the number of taps times the hidden size.
        """
        found = cls.__new__(cls)
        found.tokens = found.anchors = 0
        found._allocate(size, width, vocabulary, device, dtype)
        return found

    def _place(
        self,
        answers: Sequence[Answer],
        length: int,
        width: int,
        vocabulary: int,
        like: Tensor,
        part: tuple[int, int],
    ) -> list[_Placed]:
        """Pack answers into rows and store their tokens. Memory for the rest is of the type and device of `like`."""
        usable = [one for one in answers if len(one.answer) > 1 and len(one.prompt) + 2 <= length]
        if not usable:
            raise ConfigurationError("texts: needed an answer of two tokens within the length of a row, found none")
        texts = [(*answer.prompt, *answer.answer)[:length] for answer in usable]
        places, rows = _packed([len(text) for text in texts], length)
        self.tokens = sum(map(len, texts))
        """Tokens of all texts."""
        self._allocate((rows, length), width, vocabulary, like.device, like.dtype, part)
        starts, ends, is_anchor, tokens = torch.zeros(4, rows * length, dtype=torch.int64)
        for text, answer, place in zip(texts, usable, places, strict=True):
            inner = place % length
            starts[place : place + len(text)] = inner
            ends[place : place + len(text)] = inner + len(text)
            tokens[place : place + len(text)] = torch.tensor(text)
            is_anchor[place + len(answer.prompt) : place + len(text) - 1] = 1
        self._tokens.copy_(tokens)
        self._starts.copy_(starts)
        self._ends.copy_(ends)
        self._is_anchor.copy_(is_anchor.bool().view(rows, length))
        self.anchors = int(is_anchor.sum())
        """Tokens after which a draft can be right."""
        return [_Placed(*one) for one in zip(usable, texts, places, strict=True)]

    def _allocate(
        self,
        size: tuple[int, int],
        width: int,
        vocabulary: int,
        device: torch.device,
        dtype: torch.dtype,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.rows, self.length = size
        self.device, (self._first, self._parts) = device, part
        total, leading = self.rows * self.length, min(_LEADING, vocabulary)
        own = max(0, -(-(self.rows - self._first) // self._parts)) * self.length
        self._tokens, self._starts, self._ends = (
            torch.zeros(total, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._taps = torch.zeros((own, width), dtype=dtype, device=device)
        self._leading = torch.zeros((own, leading), dtype=torch.int32, device=device)
        self._shares = torch.zeros((own, leading), dtype=torch.float16, device=device)
        self._is_anchor = torch.zeros(size, dtype=torch.bool, device=device)
        self._weights: Tensor | None = None

    @torch.inference_mode()
    def _read(self, target: StoredTarget, batch: Sequence[_Placed], heat: float) -> None:
        """Read and store the states of texts. `heat` divides the products of the head."""
        answers, texts, places = zip(*batch, strict=True)
        longest, lengths = max(map(len, texts)), torch.tensor([len(text) for text in texts]).unsqueeze(1)
        inner = torch.arange(longest)
        stored = torch.tensor(places).unsqueeze(1) + inner
        states, last = (part.flatten(0, 1) for part in read_states(target, answers))
        is_token = inner < lengths
        stored = stored // self.length // self._parts * self.length + stored % self.length  # among own rows
        where, chosen = stored[is_token].to(self.device), is_token.flatten().nonzero().flatten().to(self.device)
        self._taps[where] = states[chosen]
        prompts = torch.tensor([len(answer.prompt) for answer in answers]).unsqueeze(1)
        is_drafted = (inner >= prompts) & (inner < lengths - 1)
        where, chosen = stored[is_drafted].to(self.device), is_drafted.flatten().nonzero().flatten().to(self.device)
        head, final = target.get_output_embeddings(), last[chosen]
        for part, goal in zip(torch.split(final, _CHUNK), torch.split(where, _CHUNK), strict=True):
            shares, leading = head(part).float().div_(heat).softmax(dim=-1).topk(self._leading.shape[1])
            self._leading[goal], self._shares[goal] = leading.int(), shares.half()

    def tap_scale(self, peers: Peers = ALONE) -> Tensor:
        """One divided by the root mean square of each element of all peers' taps, [taps x hidden size]."""
        places = self._ends.view(self.rows, self.length)[self._first :: self._parts].flatten().nonzero().flatten()
        chosen = self._taps[places[:: max(1, len(places) // _SCALE_TOKENS)]].float()
        squares = torch.cat([chosen.pow(2).sum(dim=0), chosen.new_full((1,), len(chosen))])
        squares = peers.summed(squares)
        return (squares[:-1] / squares[-1]).add_(1e-6).rsqrt_()

    def text(self, row: int, place: int) -> list[int]:
        """The tokens of a row from `place` to the end of the text there."""
        first = row * self.length + place
        found: list[int] = self._tokens[first : row * self.length + int(self._ends[first])].tolist()
        return found

    def taps(self, rows: Tensor) -> Tensor:
        """Taps [rows, length, taps x hidden size] of own rows."""
        return self._taps.view(-1, self.length, self._taps.shape[1])[rows // self._parts]

    def drawn(self, rows: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Different anchors of rows [rows, count] by chance, and whether each is one: a row may have fewer."""
        chance = torch.rand((len(rows), self.length), generator=generator, device=self.device)
        found = chance.masked_fill_(~self._is_anchor[rows], -1.0).topk(count)
        return found.indices, found.values >= 0

    def all_anchors(self, rows: Tensor) -> list[list[int]]:
        """The positions of all anchors of each row."""
        found = self._is_anchor[rows].cpu()
        return [row.nonzero().flatten().tolist() for row in found]

    def blocks(self, rows: Tensor, anchors: Tensor, slots: int) -> tuple[Blocks, Goal]:
        """The blocks of anchors [rows, blocks] of own rows, and what slots should predict [rows, blocks, slots]."""
        places = anchors.unsqueeze(2) + torch.arange(slots + 1, device=self.device)
        stored = (rows * self.length).view(-1, 1, 1) + places.clamp(max=self.length - 1)
        tokens = self._tokens[stored]
        ends = self._ends[stored[:, :, :1]]
        block = Blocks(anchors, self._starts[stored[:, :, 0]], tokens[:, :, :-1])
        read = (rows // self._parts * self.length).view(-1, 1, 1) + places[:, :, :-1].clamp(max=self.length - 1)
        is_text, weights = places[:, :, 1:] < ends, None if self._weights is None else self._weights[read]
        return block, Goal(self._leading[read].long(), self._shares[read].float(), tokens[:, :, 1:], is_text, weights)


def _packed(lengths: Sequence[int], size: int) -> tuple[list[int], int]:
    """Where each text begins in rows of `size` tokens after one another, and the number of rows.

    The longest texts come first, each in the row with the most space left.
    """
    places = [0] * len(lengths)
    space: list[tuple[int, int]] = []  # minus the space left, row
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[number]
        if space and -space[0][0] >= length:
            left, row = heapq.heappop(space)
        else:
            left, row = -size, len(space)
        places[number] = row * size + size + left
        heapq.heappush(space, (left + length, row))
    return places, len(space)
