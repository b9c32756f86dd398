"""The decision contexts of a step as arrays, which kernels read instead of objects.

Most rows change no logit but by their temperature. The others have entries, one for each token whose logit is changed
by itself (penalties, bias, the forced end of thinking), and a mask of bits for the tokens that cannot be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.core.request import SamplingParameters
from workers.sampling.allowed_tokens import TokenBits, first_bits
from workers.sampling.context import (
    GREEDY_BELOW,
    DecisionContext,
    RowDecisions,
    changes_logits,
    is_truncated,
    rows_of_contexts,
)
from workers.sampling.tree_columns import TreeColumns
from workers.sampling.warp import additions

WORD = 32
"""Bits of a word of a mask."""
MOST_COLUMNS = 1 << 22
"""Most columns of logits that kernels read. The largest vocabularies have 2¹⁸ tokens."""
NO_LIMIT = MOST_COLUMNS
"""The limit of a row without top-k."""
_LEAST_TAIL = 1e-6
"""Least share outside of top-p for which the tokens in its far tail are told apart by a bound."""

_Tokens = npt.NDArray[np.int64]
_Columns = npt.NDArray[np.int32]
_Numbers = npt.NDArray[np.float32]
_NO_COLUMNS, _NO_NUMBERS = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
_NO_TOKENS = np.zeros(0, dtype=np.int64)
_NO_SHARES = np.zeros(0, dtype=np.float64)


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
    """`[t]`: top-k; `NO_LIMIT` for none."""
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


def table_of(
    contexts: Sequence[DecisionContext], offset: int, size: int, vocabulary: int | None = None
) -> DecisionTable:
    """The table of the contexts of all rows of logits `[n, size]`. Raises `ValueError` for a position below 0.

    `vocabulary` is the number of all tokens, if the logits are those of a part of them.
    """
    rows = rows_of_contexts(contexts)
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    positions = np.repeat(np.array([len(row.tokens) for row in rows], dtype=np.int64), counts)
    if len(positions) > len(rows):
        nodes = TreeColumns([row.tree for row in rows])
        positions[firsts[nodes.trees] + 1 + nodes.places] += nodes.depths
    samplings = [row.sampling for row in rows]
    return DecisionTable(
        np.repeat(np.array([one.seed for one in samplings], dtype=np.uint64), counts).view(np.int64),
        positions,
        np.repeat(np.array([_temperature(one) for one in samplings], dtype=np.float32), counts),
        *_entries(_changes_of(rows, firsts.tolist(), offset, size), len(positions), size),
        *_truncations(samplings, counts, size if vocabulary is None else vocabulary),
    )


def _entries(
    found: Mapping[int, _Changes], count: int, size: int
) -> tuple[_Columns, int, _Columns, _Columns, _Columns, _Columns, _Numbers, _Numbers]:
    """From `masks` to `terms` of the table of `count` decisions."""
    masks = np.full(count, -1, dtype=np.int32)
    if not found:
        ends = np.zeros(count + 1, dtype=np.int32)
        return masks, 0, _words((), size), ends, _NO_COLUMNS, _NO_COLUMNS, _NO_NUMBERS, _NO_NUMBERS
    changed = [(row, changes) for row, changes in found.items() if len(changes.columns)]
    bits = {row: changes.excluded for row, changes in found.items() if changes.excluded is not None}
    masked = [*bits, *(row for row, _ in changed if row not in bits)]
    masks[masked] = np.arange(len(masked), dtype=np.int32)
    entries = np.zeros(count, dtype=np.int64)
    entries[[row for row, _ in changed]] = [len(changes.columns) for _, changes in changed]
    return (
        masks,
        len(masked),
        _words(list(bits.values()), size),
        np.cumsum([0, *entries.tolist()], dtype=np.int32),
        np.concatenate([_NO_COLUMNS, *(changes.columns for _, changes in changed)]),
        np.repeat(np.arange(count, dtype=np.int32), entries),
        np.concatenate([_NO_NUMBERS, *(changes.factors for _, changes in changed)]),
        np.concatenate([_NO_NUMBERS, *(changes.terms for _, changes in changed)]),
    )


def _truncations(
    samplings: Sequence[SamplingParameters], counts: _Tokens, vocabulary: int
) -> tuple[_Columns, _Tokens, npt.NDArray[np.float64], _Numbers, _Numbers]:
    """From `truncated` to `gaps` of the table of rows with `counts` decisions each."""
    truncates = [is_truncated(sampling) for sampling in samplings]
    if not any(truncates):
        return _NO_COLUMNS, _NO_TOKENS, _NO_SHARES, _NO_NUMBERS, _NO_NUMBERS
    is_cut = np.array(truncates, dtype=np.bool_)
    cut, repeats = [one for one, is_one in zip(samplings, truncates, strict=True) if is_one], counts[is_cut]
    gaps = [math.log(one.min_p) if one.min_p else -math.inf for one in cut]
    return (
        np.flatnonzero(np.repeat(is_cut, counts)).astype(np.int32),
        np.repeat(np.array([_limit(one.top_k, vocabulary) for one in cut], dtype=np.int64), repeats),
        np.repeat(np.array([min(one.top_p, 1.0) for one in cut], dtype=np.float64), repeats),
        np.repeat(np.array([_tail(one.top_p, vocabulary) for one in cut], dtype=np.float32), repeats),
        np.repeat(np.array(gaps, dtype=np.float32), repeats),
    )


def _temperature(sampling: SamplingParameters) -> float:
    return 0.0 if sampling.temperature < GREEDY_BELOW else sampling.temperature


def _changes_of(rows: Sequence[RowDecisions], firsts: Sequence[int], offset: int, size: int) -> dict[int, _Changes]:
    """What changes single logits of each decision, by the number of the decision, for those of which anything may."""
    found: dict[int, _Changes] = {}
    for row, first in zip(rows, firsts, strict=True):
        if not row.allowed and not changes_logits(row.sampling):
            continue
        stem = _distinct(row.tokens) if row.sampling.repetition_penalty != 1.0 else _NO_TOKENS
        for decision in range(len(row)):
            path = row.tree.path_tokens(decision - 1) if decision and len(stem) else ()
            seen = _united(stem, np.array(path, dtype=np.int64)) if path else stem
            found[first + decision] = _Changes(row.context(decision), seen, offset, size)
    return found


def _distinct(tokens: Sequence[int]) -> _Tokens:
    return np.array(sorted(set(tokens)), dtype=np.int64)


def _united(tokens: _Tokens, others: _Tokens) -> _Tokens:
    """All tokens of both, each once and ascending. A library's function for it takes several times as long."""
    both = np.sort(np.concatenate((tokens, others)))
    is_first = np.ones(len(both), dtype=np.bool_)
    is_first[1:] = both[1:] != both[:-1]
    return both[is_first]


class _Changes:
    """What changes single logits of one row: its entries, and bits of the columns that cannot be chosen."""

    def __init__(self, context: DecisionContext, repeated: _Tokens, offset: int, size: int) -> None:
        """`repeated` are the tokens before the decision, each once and ascending, if repeating them is penalized."""
        self.columns, self.factors, self.terms = _NO_COLUMNS, _NO_NUMBERS, _NO_NUMBERS
        self.excluded: TokenBits | None = None
        """Bits of the columns that cannot be chosen, as `AllowedTokens.bits`; `None` if the row has none, but few."""
        if context.forced_token is not None:
            self._force(context.forced_token - offset, size)
            return
        terms = additions(context)
        terms |= dict.fromkeys(context.excluded_tokens, -math.inf)
        self._exclude(context, offset, size)
        if len(repeated) or terms:
            self._change(repeated, context.repetition_penalty, terms)
            self._keep(offset, size)

    def _force(self, column: int, size: int) -> None:
        self.excluded = _all_bits(size)
        if 0 <= column < size:
            self.columns = np.array([column], dtype=np.int32)
            self.factors = self.terms = np.zeros(1, dtype=np.float32)

    def _exclude(self, context: DecisionContext, offset: int, size: int) -> None:
        if context.allowed is not None:
            self.excluded = context.allowed.bits_of(offset, size) ^ _all_bits(size)
        if context.sampling.allowed_token_ids:
            named = np.array(context.sampling.allowed_token_ids, dtype=np.int64) - offset
            others = np.ones(size, dtype=np.uint8)
            others[named[(named >= 0) & (named < size)]] = 0
            bits = np.packbits(others, bitorder="little")
            self.excluded = bits if self.excluded is None else self.excluded | bits

    def _change(self, repeated: _Tokens, penalty: float, terms: dict[int, float]) -> None:
        """Set the entries of all tokens, whose columns are the tokens themselves."""
        added = np.array(list(terms), dtype=np.int64)
        tokens = _united(repeated, added)
        self.columns = tokens.astype(np.int32)
        self.factors, self.terms = np.ones(len(tokens), dtype=np.float32), np.zeros(len(tokens), dtype=np.float32)
        self.factors[np.searchsorted(tokens, repeated)] = penalty
        self.terms[np.searchsorted(tokens, added)] = list(terms.values())

    def _keep(self, offset: int, size: int) -> None:
        """Drop the entries of tokens that have no column here, or one that cannot be chosen."""
        columns = self.columns - offset
        is_kept = (columns >= 0) & (columns < size)
        if self.excluded is not None:
            kept = columns[is_kept]
            is_kept[is_kept] = (self.excluded[kept >> 3] >> (kept & 7).astype(np.uint8)) & 1 == 0
        self.columns, self.factors, self.terms = columns[is_kept], self.factors[is_kept], self.terms[is_kept]


def _words(bits: Sequence[TokenBits], size: int) -> npt.NDArray[np.int32]:
    """Words `[masks, words]` of the bits of each mask."""
    found = np.zeros((len(bits), -(-size // WORD) * WORD // 8), dtype=np.uint8)
    for row, own in zip(found, bits, strict=True):
        row[: len(own)] = own
    return found.view(np.int32)


def _all_bits(size: int) -> TokenBits:
    """The bits of `size` columns, all 1."""
    return first_bits(np.full(-(-size // 8), 255, dtype=np.uint8), size)


def _limit(top_k: int, vocabulary: int) -> int:
    return top_k if 0 < top_k < vocabulary else NO_LIMIT


def _tail(share: float, vocabulary: int) -> float:
    """A bound on logits, relative to the largest, below which all tokens together are less than 1 - `share`.

    The largest token has the mass 1, so all have at least that. The other e leaves room for rounding.
    """
    return math.log((1.0 - share) / vocabulary) - 1.0 if 1.0 - share >= _LEAST_TAIL else -math.inf
