"""Compares two language models at every position of texts, with the modules of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster.core.errors import ConfigurationError

MAX_RANK = 16
"""Ranks from here on count as not drafted."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens at whose positions two models are compared."""

    tokens: tuple[int, ...]
    """The tokens that are compared, after those before them: a prompt, or the start of a decoder."""
    first: int
    """Index of the first token that is predicted; at least 1."""
    source: tuple[int, ...] = ()
    """What the encoder reads; empty for decoder-only models."""


@dataclass(frozen=True, slots=True)
class TextAgreement:
    """The comparison at the positions of one text."""

    ranks: tuple[int, ...]
    """At each position, how many tokens the draft finds more probable than the target's most probable one."""
    overlaps: tuple[float, ...]
    """Σ min(p, q) at each position: the best possible acceptance rate of a sampled token."""
    target_log_probability: float
    """Sum of the target's natural log-probabilities of the text's tokens."""
    draft_log_probability: float
    """Sum of the draft's natural log-probabilities of the text's tokens, without those outside of its vocabulary."""
    outside: int = 0
    """Tokens of the text that the draft cannot propose."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The comparison over all texts."""

    texts: tuple[TextAgreement, ...]

    @property
    def positions(self) -> int:
        """Number of compared positions."""
        return sum(len(text.ranks) for text in self.texts)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each text."""
        return tuple(text.ranks for text in self.texts)

    def share_within(self, width: int) -> float:
        """Share of positions where the target's most probable token is among the draft's `width` best."""
        hits = sum(rank < width for text in self.texts for rank in text.ranks)
        return hits / self.positions if self.positions else 0.0

    @property
    def overlap(self) -> float:
        """Mean Σ min(p, q)."""
        return sum(sum(text.overlaps) for text in self.texts) / self.positions if self.positions else 0.0

    @property
    def target_perplexity(self) -> float:
        """Perplexity of the target on the texts."""
        return _perplexity(sum(text.target_log_probability for text in self.texts), self.positions)

    @property
    def draft_perplexity(self) -> float:
        """Perplexity of the draft on the tokens that it can propose."""
        known = self.positions - sum(text.outside for text in self.texts)
        return _perplexity(sum(text.draft_log_probability for text in self.texts), known)

    @property
    def share_outside(self) -> float:
        """Share of the texts' tokens that the draft cannot propose."""
        return sum(text.outside for text in self.texts) / self.positions if self.positions else 0.0


def compare(
    target: Any, draft: Any, texts: Sequence[Text], temperature: float = 1.0, forbidden: Sequence[int] = ()
) -> Agreement:
    """Compare two models on texts. Tokens that are `forbidden` have the probability 0 in both.

    The models have the type `Any`, because the annotations of `transformers` do not cover what is called here. Raises
    `ConfigurationError` for models of different vocabularies.
    """
    known = [text for text in texts if len(text.tokens) > text.first]
    return Agreement(tuple(_compare(target, draft, text, temperature, list(forbidden)) for text in known))


@torch.inference_mode()
def _compare(target: Any, draft: Any, text: Text, temperature: float, forbidden: list[int]) -> TextAgreement:
    row = torch.tensor([text.tokens], device=target.device)
    source = torch.tensor([text.source], device=target.device)
    # [positions, vocabulary]
    own, other = (_logits(model, row, source)[text.first - 1 : -1] for model in (target, draft))
    if own.shape != other.shape:
        raise ConfigurationError(
            f"--draft: needed the target's vocabulary of {own.shape[-1]} tokens, found {other.shape[-1]}"
        )
    for logits in (own, other):
        logits[:, forbidden] = float("-inf")
    following = row[0, text.first :].unsqueeze(-1)
    chosen = own.argmax(-1, keepdim=True)
    ranks = (other > other.gather(-1, chosen)).sum(-1).clamp(max=MAX_RANK)
    impossible = other.gather(-1, chosen).squeeze(-1) == float("-inf")
    overlaps = torch.minimum((own / temperature).softmax(-1), (other / temperature).softmax(-1)).sum(-1)
    expected = own.log_softmax(-1).gather(-1, following).squeeze(-1)
    drafted = other.log_softmax(-1).gather(-1, following).squeeze(-1)
    known = drafted.isfinite()
    return TextAgreement(
        tuple(ranks.masked_fill(impossible, MAX_RANK).tolist()),
        tuple(overlaps.tolist()),
        float(expected.sum()),
        float(drafted[known].sum()),
        int((~known).sum()),
    )


def _logits(model: Any, row: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Logits in single precision, `[positions, vocabulary]`. A model without an encoder has an empty source."""
    if source.numel():
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source), "decoder_input_ids": row}
    else:
        inputs = {"input_ids": row}
    found: torch.Tensor = model(**inputs, use_cache=False).logits[0].float()
    return found


def _perplexity(log_probability: float, positions: int) -> float:
    return math.exp(-log_probability / positions) if positions else math.nan
