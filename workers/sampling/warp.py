"""The logits processors: from the target's logits to the distribution that tokens are sampled from.

They are applied in this order: repetition penalty; presence and frequency penalties and bias (one sum per token);
exclusion of tokens (all but the allowed ones, ends of too short answers, ends of bad words, what the grammar does not
allow, all but the forced end of thinking); temperature; top-k; top-p; min-p. All compute in float32. The bits of a
row's result depend on its own logits and context alone, not on the rest of the batch: sums over the vocabulary are sums
of integers, and everything else is element by element.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from cluster.core.request import SamplingParameters
from workers.sampling.context import DecisionContext
from workers.sampling.truncate import truncate
from workers.transfer import row_indices, tensor_on

_LARGEST_LOGIT = 1e30
"""Replaces +inf, so that differences and quotients of logits are numbers."""
_Column = Callable[[int], int | None]
"""Maps a token to the column of its logit, or to `None` if the row has no logit of it."""


def warp(
    logits: Tensor, contexts: Sequence[DecisionContext], offset: int = 0, vocabulary: Tensor | None = None
) -> Tensor:
    """Apply all logits processors. Returns float32 [n, size], with −inf for tokens that cannot be drawn.

    `logits` [n, size], of any floating type, are those of tokens `offset … offset + size - 1`, or those of
    `vocabulary`, int64 [size], ascending (which must not be changed afterwards). They are not modified, and are
    returned themselves where no processor applies. NaN counts as −inf. Penalties and bias ignore tokens without a
    logit. top-k, top-p and min-p are correct only over the whole vocabulary. Among equal logits the lowest token counts
    as the most probable, so top-k keeps exactly k tokens, and top-p the fewest that reach its mass, at least one. Only
    penalties, bias and exclusions apply to a greedy row. Raises `ValueError` unless there is one context per
    row.
    """
    warped = untruncated(logits, contexts, offset, vocabulary)
    truncate(warped, [(row, context.sampling) for row, context in enumerate(contexts) if context.is_truncated])
    return warped


def untruncated(
    logits: Tensor, contexts: Sequence[DecisionContext], offset: int = 0, vocabulary: Tensor | None = None
) -> Tensor:
    """`warp` without top-k, top-p and min-p. Returns the caller's own logits only where no row is truncated."""
    if len(contexts) != logits.shape[0]:
        raise ValueError(f"{len(contexts)} contexts for {logits.shape[0]} rows of logits")
    warped = _cleaned(logits)
    if all(is_unchanged(context) for context in contexts):
        return warped
    if warped.data_ptr() == logits.data_ptr():
        warped = warped.clone()
    column = _within(offset, logits.shape[1]) if vocabulary is None else _columns(vocabulary).get
    _penalise(warped, contexts, column)
    _exclude_by_grammar(warped, contexts, offset, vocabulary)
    _force(warped, contexts, column)
    _divide_by_temperature(warped, contexts)
    return warped


def is_unchanged(context: DecisionContext) -> bool:
    """Whether no logits processor applies to a row, so that `warp` returns its logits as they are."""
    return (context.is_greedy or context.sampling.temperature == 1.0) and is_only_divided(context)


def is_only_divided(context: DecisionContext) -> bool:
    """Whether no logits processor but the temperature applies to a row."""
    sampling = context.sampling
    if sampling.repetition_penalty != 1.0 or _adds(sampling) or sampling.allowed_token_ids or context.excluded_tokens:
        return False
    return context.allowed is None and context.forced_token is None and not context.is_truncated


def _cleaned(logits: Tensor) -> Tensor:
    """Convert to float32 without NaN and +inf. Returns the same tensor where it is that already."""
    logits = logits.float()
    # On a GPU the check would wait for the device and cost more than the replacement. It is also false for NaN.
    if logits.numel() == 0 or (not logits.is_cuda and bool((logits.amax(dim=-1) < math.inf).all())):
        return logits
    return logits.nan_to_num(nan=-math.inf, posinf=_LARGEST_LOGIT, neginf=-math.inf)


def _adds(sampling: SamplingParameters) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias)


# --- penalties and bias -----------------------------------------------------------------------


def _within(offset: int, size: int) -> _Column:
    tokens = range(offset, offset + size)
    return lambda token: token - offset if token in tokens else None


@lru_cache(maxsize=4)  # tensors hash by identity, so the cache compares no elements
def _columns(vocabulary: Tensor) -> dict[int, int]:
    return {token: column for column, token in enumerate(vocabulary.tolist())}


def _penalise(logits: Tensor, contexts: Sequence[DecisionContext], column: _Column) -> None:
    """Apply penalties, bias and exclusions in place."""

    def divide(values: Tensor, penalties: Tensor) -> Tensor:
        return torch.where(values > 0, values / penalties, values * penalties)

    repeated = [
        (row, token, context.repetition_penalty)
        for row, context in enumerate(contexts)
        if context.sampling.repetition_penalty != 1.0
        for token in set(context.tokens[:])  # the slice is faster than reading a `Branch` element by element
    ]
    _update(logits, repeated, column, divide)
    added = [
        (row, token, amount)
        for row, context in enumerate(contexts)
        if _adds(context.sampling)
        for token, amount in additions(context).items()
    ]
    _update(logits, added, column, torch.add)
    excluded = [
        (row, token, -math.inf) for row, context in enumerate(contexts) for token in set(context.excluded_tokens)
    ]
    _update(logits, excluded, column, lambda _, minus_infinity: minus_infinity)
    _exclude_others(logits, contexts, column)


def _exclude_others(logits: Tensor, contexts: Sequence[DecisionContext], column: _Column) -> None:
    """Exclude all but the allowed tokens of each row that names some, in place."""
    columns: dict[int, Tensor] = {}  # by identity: the rows of one sequence share their parameters
    for row, context in enumerate(contexts):
        allowed = context.sampling.allowed_token_ids
        if not allowed:
            continue
        if id(allowed) not in columns:
            inside = [index for token in allowed if (index := column(token)) is not None]
            columns[id(allowed)] = tensor_on(logits.device, inside, torch.int64)
        kept = logits[row, columns[id(allowed)]]
        logits[row] = -math.inf
        logits[row, columns[id(allowed)]] = kept


def _exclude_by_grammar(
    logits: Tensor, contexts: Sequence[DecisionContext], offset: int, vocabulary: Tensor | None
) -> None:
    """Exclude the tokens that the grammars of the rows do not allow, in place.

    The logits of a draft may have more tokens than the target's vocabulary. They are excluded too.
    """
    rows = [(row, context.allowed.mask) for row, context in enumerate(contexts) if context.allowed is not None]
    if not rows:
        return
    masks = torch.stack([mask for _, mask in rows])  # [rows, whole vocabulary]
    columns = None if vocabulary is None else vocabulary.cpu()
    end = offset + logits.shape[1] if columns is None else int(columns[-1]) + 1
    if end > masks.shape[1]:
        masks = torch.nn.functional.pad(masks, (0, end - masks.shape[1]))
    masks = masks[:, offset:end] if columns is None else masks[:, columns]
    if logits.is_cuda:
        masks = masks.contiguous().pin_memory().to(logits.device, non_blocking=True)
    indices = row_indices([row for row, _ in rows], logits)
    logits[indices] = logits[indices].masked_fill(~masks, -math.inf)


def _force(logits: Tensor, contexts: Sequence[DecisionContext], column: _Column) -> None:
    """Exclude all but the forced token of each row that has one, in place, whatever else excludes it."""
    for row, context in enumerate(contexts):
        token = context.forced_token
        if token is not None:
            logits[row] = -math.inf
            if (index := column(token)) is not None:
                logits[row, index] = 0.0


def additions(context: DecisionContext) -> dict[int, float]:
    """The sum that is added to the logit of each token: its bias minus its penalties."""
    sampling = context.sampling
    additions: dict[int, float] = {}
    for token, bias in sampling.logit_bias:
        additions[token] = additions.get(token, 0.0) + bias
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(context.tokens[context.prompt_len :]).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            additions[token] = additions.get(token, 0.0) - penalty
    return additions


def _update(
    logits: Tensor,
    entries: Iterable[tuple[int, int, float]],
    column: _Column,
    change: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Replace the logits at distinct (row, token, amount) by `change(logits, amounts)`, in place."""
    inside = [(row, index, amount) for row, token, amount in entries if (index := column(token)) is not None]
    if not inside:
        return
    rows, columns = tensor_on(logits.device, [entry[:2] for entry in inside], torch.int64).unbind(dim=1)
    amounts = tensor_on(logits.device, [entry[2] for entry in inside], logits.dtype)
    logits[rows, columns] = change(logits[rows, columns], amounts)


def _divide_by_temperature(logits: Tensor, contexts: Sequence[DecisionContext]) -> None:
    """Divide each row by its temperature, in place. Greedy rows are not changed."""
    divisors = [1.0 if context.is_greedy else context.sampling.temperature for context in contexts]
    if any(divisor != 1.0 for divisor in divisors):
        # The divisor is a tensor: to divide by a number, GPUs multiply by the reciprocal, which rounds differently.
        logits /= tensor_on(logits.device, divisors, logits.dtype).unsqueeze(1)


def log_distribution(logits: Tensor, contexts: Sequence[DecisionContext]) -> Tensor:
    """Log-probabilities of the distribution that each row's token is drawn from, from logits [n, vocab].

    Returns float32 [n, vocab]: after penalties, temperature, top-k, top-p and min-p, −inf for tokens that cannot be
    drawn. A greedy row has the log-probabilities after penalties, at temperature 1. A row whose logits are all NaN or
    −inf has −inf everywhere. Raises `ValueError` unless there is one context per row.
    """
    log_probabilities = warp(logits, contexts).log_softmax(dim=1)
    return log_probabilities.masked_fill_(log_probabilities.isnan(), -math.inf)
