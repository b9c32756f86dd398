"""Log-probabilities of prompt tokens, for requests that want them.

The logits at one prompt token score the next one. Those at the end of a prompt chunk wait for the next chunk. A
sequence whose prompt is scored takes no stored KV, so that every prompt token is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

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
        waiting = any(entry.sequence.prompt_end is not None for entry in ready)
        return logits, _scored(ready, [logits[:0]] * len(ready)) if waiting else [ScoredPrompt()] * len(ready)
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
        found = _scored(ready, torch.split(whole, scores))
    return rows_of(logits, decided), found


def _scored(ready: Sequence[ReadyRow], logits: Sequence[torch.Tensor]) -> list[ScoredPrompt]:
    """Score the prompt tokens of all rows together, given logits `[scored, vocabulary]` at each row's first tokens."""
    pieces: list[torch.Tensor] = []
    tokens: list[int] = []
    counts: list[int] = []
    ends: list[tuple[int, torch.Tensor | None]] = []
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
        tokens += scored
        counts += [sequence.start.sampling.prompt_logprobs or 0] * len(scored)
        ends.append((len(scored), end))
    found = iter(token_logprobs(pieces, tokens, counts))
    return [ScoredPrompt(tuple(islice(found, count)), end) for count, end in ends]
