"""Log-probabilities of prompt tokens, for requests that want them.

The logits at one prompt token score the next one. Those at the end of a prompt chunk wait for the next chunk. A
sequence whose prompt is scored takes no stored KV, so that every prompt token is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cluster.core.request import SequenceStart, TokenLogprobs
from cluster.core.verification import VerifyRow
from workers.sampling.logprobs import LaunchedLogprobs, launch_logprobs
from workers.transfer import HostCopies, rows_of
from workers.verify.decider import Decider
from workers.verify.sequence_state import ReadyRow


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt:
    """What a row of a step shows of its prompt."""

    read: Callable[[], tuple[TokenLogprobs, ...]] = tuple
    """Returns log-probabilities of the row's tokens; the first token of a prompt has none. The host may wait for the
    device."""
    end: torch.Tensor | None = None
    """The sequence's next `prompt_end`, once the row is committed."""


def scored_count(row: VerifyRow, start: SequenceStart) -> int:
    """The number of pending tokens, counted from the first, whose logits score a token of the prompt."""
    if start.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(len(row.pending), start.prompt_len - 1 - row.start_len))


def without_prompts(
    ready: Sequence[ReadyRow], logits: torch.Tensor, decider: Decider, copies: HostCopies
) -> tuple[torch.Tensor, list[ScoredPrompt]]:
    """Split the logits of a pass: those of the decisions, and per row what is scored of its prompt.

    `logits` are `[selected, vocabulary (this rank's part)]`. With several ranks, rank 0 has the log-probabilities, and
    all ranks call this. It changes no sequence: a step that fails later is repeated. The log-probabilities are copied
    to the host with all other `copies`.
    """
    scores = [entry.scored for entry in ready]
    if not any(scores):
        waiting = any(entry.sequence.prompt_end is not None for entry in ready)
        return logits, _scored(ready, [logits[:0]] * len(ready), copies) if waiting else [ScoredPrompt()] * len(ready)
    decided: list[int] = []
    scored: list[int] = []
    first = 0
    for entry in ready:
        last = first + len(entry.forward.select)
        scored.extend(range(first, first + entry.scored))
        decided.extend(range(first + entry.scored, last))
        first = last
    whole = decider.whole(rows_of(logits, scored))
    found = [ScoredPrompt()] * len(ready)
    if whole is not None:
        found = _scored(ready, torch.split(whole, scores), copies)
    return rows_of(logits, decided), found


def _scored(ready: Sequence[ReadyRow], logits: Sequence[torch.Tensor], copies: HostCopies) -> list[ScoredPrompt]:
    """Score the prompt tokens of all rows together, given logits `[scored, vocabulary]` at each row's first tokens."""
    pieces: list[torch.Tensor] = []
    tokens: list[int] = []
    counts: list[int] = []
    ends: list[tuple[range, torch.Tensor | None]] = []
    for entry, own in zip(ready, logits, strict=True):
        sequence, pending, end = entry.sequence, entry.row.pending, None
        scored = list(pending[1 : len(own) + 1])
        if len(own) and len(own) == len(pending):  # the last logits score the first token of the next chunk
            own, end = own[:-1], own[-1:].clone()
        if sequence.prompt_end is not None:
            pieces.append(sequence.prompt_end)
            scored = [pending[0], *scored]
        if len(own):  # else it may have the vocabulary of one rank alone
            pieces.append(own)
        ends.append((range(len(tokens), len(tokens) + len(scored)), end))
        tokens += scored
        counts += [sequence.start.sampling.prompt_logprobs or 0] * len(scored)
    launched = launch_logprobs(pieces, tokens, counts, (), copies)
    return [ScoredPrompt(partial(_read, launched, rows, tokens), end) for rows, end in ends]


def _read(launched: LaunchedLogprobs, rows: range, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(launched.of(row, tokens[row]) for row in rows)
