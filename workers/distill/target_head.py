"""The target's distribution of the tokens of served texts, from its last hidden states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from cluster.core.errors import ModelLoadError
from cluster.core.request import SamplingParameters
from workers.distill.answers import Leading
from workers.model.draft_card import DraftDescription
from workers.model.drafting.ends import rms_norm
from workers.model.drafting.files import read_target_ends

_ALTERNATIVES = 32
"""Tokens whose probabilities are kept for a position, at most: the most probable ones."""
_ROWS = 8192
"""Rows of the head whose products are in memory at once."""
_GREEDY_TEMPERATURE = 1.0
"""The temperature of the probabilities that are learned of texts that were decoded greedily."""
_LEAST_TEMPERATURE = 0.01
"""Lower temperatures count as this one: all probability is at one token."""
_GREEDY_SHARE = 0.5
"""The share of such a text's own token in what is learned at its position. The rest is the target's distribution."""


class TargetHead:
    """Computes the probabilities of the tokens that a draft can propose.

    The head's rows stay in the type of the target's files, and become float32 in parts: all of them may take gigabytes.
    """

    def __init__(
        self,
        head: Tensor,
        norm: Tensor | None,
        epsilon: float,
        bias: Tensor | None = None,
        vocabulary: Tensor | None = None,
    ) -> None:
        """`head` [target vocabulary, hidden size], `norm` [hidden size] and `bias` [target vocabulary] are its own.

        `vocabulary` [draft vocabulary], int64, are the tokens that can be proposed, ascending; `None` means all.
        """
        self._head = head
        self._norm = None if norm is None else norm.float()
        self._epsilon = epsilon
        self._bias = bias
        self._vocabulary = torch.arange(len(head)) if vocabulary is None else vocabulary.cpu().long()
        self._row_of = torch.full((len(head),), -1).scatter_(
            0, self._vocabulary, torch.arange(len(self._vocabulary))
        )  # [target vocabulary]

    @property
    def position_products(self) -> int:
        """Products of two numbers that the probabilities at one position take."""
        return len(self._vocabulary) * self._head.shape[1]

    def leading(self, states: Tensor, tokens: Tensor, sampling: SamplingParameters) -> Leading:
        """The most probable tokens in the place of each of `tokens` [tokens], int64, which the target wrote.

        `states` [known, hidden size] are the residual streams after the last layer at the positions before the first of
        these tokens. Of a token whose state is unknown, and where the request has changed the target's distribution in
        other ways than by its temperature, the token itself is certain. A position whose token cannot be proposed has
        none: -1. Probabilities are those at the temperature of the request; of a greedy one, at temperature 1, and
        its token gets half of the whole.
        """
        width = min(_ALTERNATIVES, len(self._vocabulary))
        found = torch.full((len(tokens), width), -1)
        shares = torch.zeros(len(tokens), width)
        found[:, 0], shares[:, 0] = tokens, 1.0
        count = min(len(states), len(tokens)) if is_plain(sampling) else 0
        if count:
            greedy = sampling.temperature == 0
            temperature = _GREEDY_TEMPERATURE if greedy else max(_LEAST_TEMPERATURE, sampling.temperature)
            best, kept = self._most_probable(states[:count], temperature)
            if greedy:
                best, kept = _with_written(best, kept, self._row_of[tokens[:count]])
            found[:count], shares[:count] = self._vocabulary[best], kept
        shares[self._row_of[tokens] < 0] = 0.0
        found, logarithms = found.masked_fill(shares <= 0, -1), shares.log()
        return Leading(found.int().numpy(), logarithms.half().numpy())

    def _most_probable(self, states: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Rows of the vocabulary [positions, alternatives] and their probabilities, the highest first."""
        states = states.float()
        if self._norm is not None:
            states = rms_norm(states, self._norm, self._epsilon)
        total = states.new_full((len(states),), -torch.inf)
        best, rows = states.new_empty((len(states), 0)), torch.empty((len(states), 0), dtype=torch.long)
        for first in range(0, len(self._vocabulary), _ROWS):
            own = self._vocabulary[first : first + _ROWS]
            bias = None if self._bias is None else self._bias[own].float()
            logits = linear(states, self._head[own].float(), bias) / temperature
            total = torch.logaddexp(total, logits.logsumexp(dim=1))
            best = torch.cat([best, logits], dim=1)
            rows = torch.cat([rows, torch.arange(first, first + len(own)).expand(len(states), -1)], dim=1)
            best, order = best.topk(min(_ALTERNATIVES, best.shape[1]), dim=1)
            rows = rows.gather(1, order)
        return rows, (best - total.unsqueeze(1)).exp()


def read_target_head(directory: Path, card: DraftDescription, vocabulary: Tensor | None) -> TargetHead | None:
    """The head of the target of a draft with this card, for the tokens of its vocabulary.

    `None` for a target whose ends cannot be read as a norm and a matrix: what it decided is known of it then.
    """
    try:
        ends = read_target_ends(directory, card)
    except ModelLoadError:
        return None
    return TargetHead(ends.head, ends.norm, ends.epsilon, ends.bias, vocabulary)


def is_plain(sampling: SamplingParameters) -> bool:
    """Whether a request draws from the target's own distribution, at a temperature and perhaps without its tail."""
    usual = SamplingParameters()
    compared = replace(
        sampling,
        temperature=usual.temperature,
        top_k=usual.top_k,
        top_p=usual.top_p,
        min_p=usual.min_p,
        seed=usual.seed,
        logprobs=usual.logprobs,
        end_token_ids=usual.end_token_ids,
        logprob_token_ids=usual.logprob_token_ids,
        prompt_logprobs=usual.prompt_logprobs,
    )
    return compared == usual


def _with_written(rows: Tensor, shares: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
    """The distributions, mixed with the written tokens' rows [positions]; the highest probability is first.

    A written token that is not among the most probable ones takes the place of the last of them.
    """
    is_written = rows == written.unsqueeze(1)
    is_last = torch.zeros_like(is_written)
    is_last[:, -1] = ~is_written.any(dim=1)
    rows = torch.where(is_last, written.unsqueeze(1), rows)
    shares = shares.masked_fill(is_last, 0.0) * (1 - _GREEDY_SHARE) + (is_written | is_last) * _GREEDY_SHARE
    shares, order = shares.sort(dim=1, descending=True, stable=True)
    return rows.gather(1, order), shares
