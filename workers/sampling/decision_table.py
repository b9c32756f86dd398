"""The decision contexts of a step as arrays, which kernels read instead of objects.

Most rows change no logit but by their temperature. The others have entries, one for each token whose logit is changed
by itself (penalties, bias, the forced end of thinking), and a mask of bits for the tokens that cannot be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.sampling.context import DecisionContext
from workers.sampling.warp import additions

WORD = 32
"""Bits of a word of a mask."""
MOST_COLUMNS = 1 << 22
"""Most columns of logits that kernels read. The largest vocabularies have 2¹⁸ tokens."""
_LEAST_TAIL = 1e-6
"""Least share outside of top-p for which the tokens in its far tail are told apart by a bound."""

_Bits = npt.NDArray[np.uint8]
_NO_COLUMNS, _NO_NUMBERS = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class DecisionTable:
    """The contexts of `n` rows of logits `[n, size]` of the tokens `offset … offset + size - 1`."""

    seeds: npt.NDArray[np.int64]
    """`[n]`: the bits of the unsigned seeds."""
    positions: npt.NDArray[np.int64]
    """`[n]`"""
    temperatures: npt.NDArray[np.float32]
    """`[n]`; 0 for greedy rows."""
    masks: npt.NDArray[np.int32]
    """`[n]`: index of the row's mask, -1 if it has none. The first masks are `excluded`, the others begin empty."""
    mask_count: int
    """Number of masks. A row with entries has one, since its entries replace its logits."""
    excluded: npt.NDArray[np.int32]
    """`[some masks, words]`: bits of the columns that cannot be chosen."""
    ends: npt.NDArray[np.int32]
    """`[n + 1]`: row `i` has the entries `ends[i] … ends[i + 1] - 1`."""
    columns: npt.NDArray[np.int32]
    """`[entries]`: the column of an entry, distinct within a row."""
    rows: npt.NDArray[np.int32]
    """`[entries]`: the row of an entry."""
    factors: npt.NDArray[np.float32]
    """`[entries]`: the repetition penalty, or 0 if the logit is replaced by the term."""
    terms: npt.NDArray[np.float32]
    """`[entries]`: what is added to the logit after that, minus infinity to exclude it."""
    truncated: npt.NDArray[np.int32]
    """`[t]`: rows with top-k, top-p or min-p."""
    limits: npt.NDArray[np.int64]
    """`[t]`: top-k; the size of the vocabulary for none."""
    shares: npt.NDArray[np.float64]
    """`[t]`: top-p; 1 for none."""
    tails: npt.NDArray[np.float32]
    """`[t]`: a token whose logit lies below the largest by more than this (a number below 0) is outside of top-p."""
    gaps: npt.NDArray[np.float32]
    """`[t]`: the logarithm of min-p; minus infinity for none."""

    @property
    def most_entries(self) -> int:
        """Most entries of a row."""
        return int(np.diff(self.ends).max(initial=0))


def table_of(contexts: Sequence[DecisionContext], offset: int, size: int) -> DecisionTable:
    """The table of the contexts of all rows of logits `[n, size]`. Raises `ValueError` for a position below 0."""
    found = [_Changes(context, offset, size) for context in contexts]
    with_bits = [row for row, changes in enumerate(found) if changes.excluded is not None]
    without = [row for row, changes in enumerate(found) if changes.excluded is None and len(changes.columns)]
    masks = np.full(len(contexts), -1, dtype=np.int32)
    masks[[*with_bits, *without]] = np.arange(len(with_bits) + len(without), dtype=np.int32)
    bits = [changes.excluded for changes in found if changes.excluded is not None]
    listed = [changes for changes in found if len(changes.columns)]
    counts = [len(changes.columns) for changes in found]
    truncated = [(row, context.sampling) for row, context in enumerate(contexts) if context.is_truncated]
    samplings = [sampling for _, sampling in truncated]
    return DecisionTable(
        seeds=np.array([context.sampling.seed for context in contexts], dtype=np.uint64).view(np.int64),
        positions=np.array([context.position for context in contexts], dtype=np.int64),
        temperatures=np.array(
            [0.0 if context.is_greedy else context.sampling.temperature for context in contexts], dtype=np.float32
        ),
        masks=masks,
        mask_count=len(with_bits) + len(without),
        excluded=_words(bits, size),
        ends=np.cumsum([0, *counts], dtype=np.int32),
        columns=np.concatenate([_NO_COLUMNS, *(changes.columns for changes in listed)]),
        rows=np.repeat(np.arange(len(contexts), dtype=np.int32), counts),
        factors=np.concatenate([_NO_NUMBERS, *(changes.factors for changes in listed)]),
        terms=np.concatenate([_NO_NUMBERS, *(changes.terms for changes in listed)]),
        truncated=np.array([row for row, _ in truncated], dtype=np.int32),
        limits=np.array([min(sampling.top_k or size, size) for sampling in samplings], dtype=np.int64),
        shares=np.array([min(sampling.top_p, 1.0) for sampling in samplings], dtype=np.float64),
        tails=np.array([_tail(sampling.top_p, size) for sampling in samplings], dtype=np.float32),
        gaps=np.array(
            [math.log(sampling.min_p) if sampling.min_p else -math.inf for sampling in samplings], dtype=np.float32
        ),
    )


class _Changes:
    """What changes single logits of one row: its entries, and bits of the columns that cannot be chosen."""

    def __init__(self, context: DecisionContext, offset: int, size: int) -> None:
        self.columns, self.factors, self.terms = _NO_COLUMNS, _NO_NUMBERS, _NO_NUMBERS
        self.excluded: _Bits | None = None
        """uint8 `[size]`, 1 for columns that cannot be chosen; `None` if the row has no such columns, but few."""
        if context.forced_token is not None:
            self._force(context.forced_token - offset, size)
            return
        factors: dict[int, float] = {}
        if context.sampling.repetition_penalty != 1.0:
            factors = dict.fromkeys(context.tokens[:], context.repetition_penalty)
        terms = additions(context)
        terms |= dict.fromkeys(context.excluded_tokens, -math.inf)
        self._exclude(context, offset, size)
        if factors or terms:
            self._change(factors, terms, offset, size)

    def _force(self, column: int, size: int) -> None:
        self.excluded = np.ones(size, dtype=np.uint8)
        if 0 <= column < size:
            self.columns = np.array([column], dtype=np.int32)
            self.factors = self.terms = np.zeros(1, dtype=np.float32)

    def _exclude(self, context: DecisionContext, offset: int, size: int) -> None:
        if context.allowed is not None:
            self.excluded = 1 - context.allowed.mask[offset : offset + size].numpy().view(np.uint8)
        if context.sampling.allowed_token_ids:
            named = np.array(context.sampling.allowed_token_ids, dtype=np.int64) - offset
            others = np.ones(size, dtype=np.uint8)
            others[named[(named >= 0) & (named < size)]] = 0
            self.excluded = others if self.excluded is None else self.excluded | others

    def _change(self, factors: dict[int, float], terms: dict[int, float], offset: int, size: int) -> None:
        tokens = np.array(sorted(factors.keys() | terms.keys()), dtype=np.int64)
        is_kept = (tokens >= offset) & (tokens < offset + size)
        if self.excluded is not None:
            is_kept[is_kept] = self.excluded[tokens[is_kept] - offset] == 0
        tokens = tokens[is_kept]
        self.columns = (tokens - offset).astype(np.int32)
        listed: list[int] = tokens.tolist()
        self.factors = np.array([factors.get(token, 1.0) for token in listed], dtype=np.float32)
        self.terms = np.array([terms.get(token, 0.0) for token in listed], dtype=np.float32)


def _words(bits: Sequence[_Bits], size: int) -> npt.NDArray[np.int32]:
    """Words `[masks, words]` of the bits `[size]` of each mask."""
    padded = np.zeros((len(bits), -(-size // WORD) * WORD), dtype=np.uint8)
    for row, found in zip(padded, bits, strict=True):
        row[:size] = found
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def _tail(share: float, size: int) -> float:
    """A bound on logits, relative to the largest, below which all tokens together are less than 1 - `share`.

    The largest token has the mass 1, so all have at least that. The other e leaves room for rounding.
    """
    return math.log((1.0 - share) / size) - 1.0 if 1.0 - share >= _LEAST_TAIL else -math.inf
