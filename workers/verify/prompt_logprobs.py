"""Log-probabilities of prompt tokens, for requests that want them.

The logits at one prompt token score the next one. Those at the end of a prompt chunk wait for the next chunk. A
sequence whose prompt is scored takes no stored KV, so that every prompt token is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from cluster.core.request import SequenceStart, TokenLogprobs
from cluster.core.verification import VerifyRow
from workers.sampling.logprobs import token_logprobs
from workers.transfer import rows_of
from workers.verify.decider import Decider
from workers.verify.sequence_state import ReadyRow


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt:
    """What a row of a step shows of its prompt."""

    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the row's tokens; the first token of a prompt has none."""
    end: torch.Tensor | None = None
    """The sequence's next `prompt_end`, once the row is committed."""


def scored_count(row: VerifyRow, start: SequenceStart) -> int:
    """The number of pending tokens, counted from the first, whose logits score a token of the prompt."""
    if start.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(len(row.pending), start.prompt_len - 1 - row.start_len))


def without_prompts(
    ready: Sequence[ReadyRow], logits: torch.Tensor, decider: Decider
) -> tuple[torch.Tensor, list[ScoredPrompt]]:
    """Split the logits of a pass: those of the decisions, and per row what is scored of its prompt.

    `logits` are `[selected, vocabulary (this rank's part)]`. With several ranks, rank 0 has the log-probabilities, and
    all ranks call this. It changes no sequence: a step that fails later is repeated.
    """
    scores = [entry.scored for entry in ready]
    if not any(scores):
        nothing = logits[:0]
        return logits, [_score(entry, nothing) for entry in ready]
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
        starts = accumulate(scores, initial=0)
        found = [_score(entry, whole[at : at + entry.scored]) for entry, at in zip(ready, starts, strict=False)]
    return rows_of(logits, decided), found


def _score(entry: ReadyRow, logits: torch.Tensor) -> ScoredPrompt:
    """Score the prompt tokens of one row, given logits `[scored, vocabulary]` at its first pending tokens."""
    sequence, pending = entry.sequence, entry.row.pending
    before, end = sequence.prompt_end, None
    if not len(logits) and before is None:
        return ScoredPrompt()
    tokens = pending[1 : len(logits) + 1]
    if len(logits) == len(pending):  # the last logits score the first token of the next chunk
        logits, end = logits[:-1], logits[-1:].clone()
    if before is not None:
        logits, tokens = torch.cat((before, logits)) if len(logits) else before, (pending[0], *tokens)
    count = sequence.start.sampling.prompt_logprobs or 0
    return ScoredPrompt(token_logprobs(logits, tokens, [count] * len(tokens)), end)
