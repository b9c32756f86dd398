"""Reported log-probabilities: those of the model itself, before penalties, temperature and truncation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.core.request import TokenLogprobs
from workers.sampling import decide
from workers.sampling.row_sums import sums_by_halves
from workers.transfer import HostArray, HostCopies, tensor_on

LEAST_LOGPROB = -9999.0
"""Reported for an impossible token, because JSON has no −inf. OpenAI's API reports the same number."""
_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Logits processed at a time. The limit bounds copies in float64."""
_BLOCK = 64
"""Tokens whose largest logit is found first. The most probable tokens are in the blocks with the largest ones."""
RowReader = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""`workers.sampling.triton.logprobs.read_rows`"""


def token_logprobs(
    logits: Tensor | Sequence[Tensor],
    tokens: Sequence[int],
    counts: Sequence[int],
    listed: Sequence[Sequence[int]] = (),
) -> tuple[TokenLogprobs, ...]:
    """The log-probability of each row's token, and those of its `counts[i]` most probable tokens.

    If a row has tokens in `listed[i]`, they are reported instead of the most probable ones, most probable first.
    `logits` [n, vocab] are the model's, over the whole vocabulary, in one tensor or in several of some rows each, of at
    most 32 bits. Log-probabilities are natural logarithms, computed in float64. Tokens of equal probability are ordered
    by token, listed ones as they are listed. The host waits for the device once.

    Raises `ValueError` for arguments of unequal length or a token outside the vocabulary.
    """
    launched = launch_logprobs(logits, tokens, counts, listed, HostCopies())
    return tuple(launched.of(row, token) for row, token in enumerate(tokens))


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedLogprobs:
    """Log-probabilities that a device may still compute."""

    _numbers: Callable[[], HostArray]
    """The `_numbers` of all rows, for `_most` tokens."""
    _most: int
    _listed: Sequence[Sequence[int]]
    _counts: Sequence[int]

    def of(self, row: int, token: int) -> TokenLogprobs:
        """What is reported of a row, whose token this is. The host may wait for the device."""
        return _reported(token, self._numbers()[row].tolist(), self._most, self._listed[row], self._counts[row])


def launch_logprobs(
    logits: Tensor | Sequence[Tensor],
    tokens: Sequence[int] | Tensor,
    counts: Sequence[int],
    listed: Sequence[Sequence[int]],
    copies: HostCopies,
) -> LaunchedLogprobs:
    """Let the device compute what `token_logprobs` returns. The numbers are copied to the host with all other `copies`.

    `tokens` may be int64 [n] on the GPU of the logits; what is computed for a token of -1 has no meaning.
    """
    pieces = [logits] if isinstance(logits, Tensor) else list(logits)
    rows = sum(map(len, pieces))
    if not rows == len(tokens) == len(counts) or len(listed) not in (0, rows):
        lengths = f"{len(tokens)} tokens, {len(counts)} counts and {len(listed)} lists of tokens"
        raise ValueError(f"{rows} rows of logits, {lengths}")
    if not rows:
        return LaunchedLogprobs(lambda: np.empty((0, 3)), 0, (), ())
    vocabulary, names = pieces[0].shape[1], [tuple(each) for each in listed] or [()] * rows
    known = () if isinstance(tokens, Tensor) else tokens
    for token in (*known, *(token for each in names for token in each)):
        if not 0 <= token < vocabulary:
            raise ValueError(f"token {token} is outside the vocabulary of {vocabulary}")
    kept = [0 if each else max(0, min(count, vocabulary)) for count, each in zip(counts, names, strict=True)]
    most, widest = max(kept), max(map(len, names))
    device = pieces[0].device
    named = tensor_on(device, [(*each, *(0,) * (widest - len(each))) for each in names], torch.int64)
    parts: list[Tensor] = []
    first = 0
    for chunk in _chunks(pieces):
        last = first + len(chunk)
        parts.append(_numbers(chunk, tokens[first:last], most, named[first:last]))
        first = last
    return LaunchedLogprobs(copies.add(torch.cat(parts)), most, names, kept)


def _chunks(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """The logits of some rows at a time."""
    for piece in pieces:
        rows = max(1, _CHUNK_ELEMENTS.get(piece.device.type, 1 << 23) // max(1, piece.shape[1]))
        yield from torch.split(piece.detach(), rows) if len(piece) else ()


def _reported(token: int, numbers: Sequence[float], most: int, names: Sequence[int], count: int) -> TokenLogprobs:
    """What is reported of a row, given its `_numbers` for `most` tokens."""
    rank, normalizer, own = numbers[:3]
    if names:
        others = sorted(zip(names, numbers[3 + 2 * most :], strict=False), key=lambda one: -one[1])
    else:
        others = list(zip(map(int, numbers[3 : 3 + count]), numbers[3 + most : 3 + most + count], strict=True))
    top = tuple((other, _logprob(value, normalizer)) for other, value in others)
    return TokenLogprobs(token, _logprob(own, normalizer), top, int(rank))


def _logprob(logit: float, normalizer: float) -> float:
    """A log-probability that JSON has a number for, also in a row without any finite logit."""
    found = logit - normalizer  # NaN where both are −inf
    return min(found, 0.0) if found > LEAST_LOGPROB else LEAST_LOGPROB


def _numbers(logits: Tensor, tokens: Sequence[int] | Tensor, count: int, listed: Tensor) -> Tensor:
    """Numbers of rows of logits [n, vocab], as float64 [n, 3 + 2 · count + m], which is exact for any token.

    In this order: the rank of each row's token; the log of the row's sum; the token's logit; the `count` most probable
    tokens; their logits; the logits of the `listed` tokens, int64 [n, m].
    """
    if logits.is_cuda:
        chosen = tokens if isinstance(tokens, Tensor) else tensor_on(logits.device, tokens, torch.int64)
        chosen = chosen.clamp(min=0)
        reader = _row_reader()
        if reader is None or count * _BLOCK > logits.shape[1]:
            return numbers_together(logits, chosen, count, listed)
        return numbers_of_blocks(reader, logits, chosen, count, listed)
    rows = zip(logits, tokens, listed, strict=True)
    return torch.stack([_row_numbers(row, token, count, names) for row, token, names in rows])


def _row_numbers(logits: Tensor, token: int, count: int, listed: Tensor) -> Tensor:
    """The `_numbers` of one row of logits [vocab]. On a CPU this stays in its cache."""
    clean = _clean(logits)
    own = clean[token : token + 1]
    rank = 1 + (clean > own).sum() + (clean[:token] == own).sum()
    top = listed[:0]
    if count:
        candidates = (clean >= clean.topk(count).values[-1]).nonzero().squeeze(1)  # in order of token
        top = candidates[clean[candidates].sort(descending=True, stable=True).indices[:count]]
    return torch.cat((rank.double()[None], _log_sums(clean[None]), own, top.double(), clean[top], clean[listed]))


def numbers_together(logits: Tensor, tokens: Tensor, count: int, listed: Tensor) -> Tensor:
    """The `_numbers` of all rows at once, without a wait for the number of candidates. `tokens` are int64 [n]."""
    clean = _clean(logits)
    own = clean.gather(1, tokens[:, None])
    columns = torch.arange(clean.shape[1], device=clean.device)
    is_ahead = (clean > own) | ((clean == own) & (columns < tokens[:, None]))
    top = keys_in_order(clean.float()).topk(count, dim=1).indices
    parts = (1 + is_ahead.sum(1, keepdim=True)).double(), _log_sums(clean)[:, None], own, top.double()
    return torch.cat((*parts, clean.gather(1, top), clean.gather(1, listed)), dim=1)


def numbers_of_blocks(read: RowReader, logits: Tensor, tokens: Tensor, count: int, listed: Tensor) -> Tensor:
    """What `numbers_together` returns, by one pass over the logits. `count` is at most the number of whole blocks."""
    size = logits.shape[1]
    numbers, largest = read(logits, tokens, _BLOCK)
    blocks = keys_in_order(largest).topk(count, dim=1).indices.sort(dim=1).values
    columns = (blocks.unsqueeze(2) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(1)
    values = _clean(logits.gather(1, columns.clamp(max=size - 1))).masked_fill_(columns >= size, -math.inf)
    places = keys_in_order(values.float()).topk(count, dim=1).indices
    top = columns.gather(1, places).double()
    return torch.cat((numbers, top, values.gather(1, places), _clean(logits.gather(1, listed))), dim=1)


def _row_reader() -> RowReader | None:
    """What reads logits on a GPU once, if the package `triton` is installed."""
    if not decide.has_triton():
        return None
    from workers.sampling.triton.logprobs import read_rows

    return read_rows


def keys_in_order(numbers: Tensor) -> Tensor:
    """Different integers in the order of float32 numbers [n, size] of a row, of equal ones in that of columns from last
    to first: int64 [n, size]. `topk` may return equal numbers in any order."""
    bits = (numbers + 0.0).view(torch.int32)  # there is one zero
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.long() << 32) - torch.arange(numbers.shape[1], device=numbers.device)


def _clean(logits: Tensor) -> Tensor:
    """Logits in float64, without NaN and +inf."""
    return logits.double().nan_to_num(nan=-math.inf, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)


def _log_sums(logits: Tensor) -> Tensor:
    """The logarithm of the sum of each row's exponentials, float64 [n]. Neighbours do not change its rounding."""
    if logits.device.type == "cpu":
        return torch.stack([row.logsumexp(dim=0) for row in logits])
    return log_sums_by_halves(logits)


def log_sums_by_halves(logits: Tensor) -> Tensor:
    """What `_log_sums` returns, by `sums_by_halves`."""
    largest = logits.amax(dim=1, keepdim=True)
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    return sums_by_halves((logits - largest).exp()).log() + largest.squeeze(1)
