"""Log-probabilities of prompt tokens, for requests that want them.

The logits at one prompt token score the next one. Those at the end of a prompt chunk wait for the next chunk. A
sequence whose prompt is scored takes no stored KV, so that every prompt token is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from cluster.core.request import SequenceStart, TokenLogprobs
from cluster.core.verification import VerifyRow
from workers.sampling.logprobs import token_logprobs
from workers.verify.decider import Decider
from workers.verify.sequence_state import ReadyRow


def scored_count(row: VerifyRow, start: SequenceStart) -> int:
    """The number of pending tokens, counted from the first, whose logits score a token of the prompt."""
    if start.sampling.prompt_logprobs is None:
        return 0
    return max(0, min(len(row.pending), start.prompt_len - 1 - row.start_len))


def without_prompts(
    ready: Sequence[ReadyRow], logits: torch.Tensor, decider: Decider
) -> tuple[torch.Tensor, list[tuple[TokenLogprobs, ...]]]:
    """Split the logits of a pass: those of the decisions, and per row the log-probabilities of its prompt tokens.

    `logits` are `[selected, vocabulary (this rank's part)]`. With several ranks, rank 0 has the log-probabilities, and
    all ranks call this.
    """
    scores = [entry.scored for entry in ready]
    if not any(scores):
        waiting = [entry.sequence.prompt_end is not None for entry in ready]
        return logits, [_score(entry, logits[:0]) if waits else () for entry, waits in zip(ready, waiting, strict=True)]
    decided: list[int] = []
    scored: list[int] = []
    first = 0
    for entry in ready:
        last = first + len(entry.forward.select)
        scored.extend(range(first, first + entry.scored))
        decided.extend(range(first + entry.scored, last))
        first = last
    whole = decider.whole(logits[scored])
    found: list[tuple[TokenLogprobs, ...]] = [()] * len(ready)
    if whole is not None:
        starts = accumulate(scores, initial=0)
        found = [_score(entry, whole[at : at + entry.scored]) for entry, at in zip(ready, starts, strict=False)]
    return logits[decided], found


def _score(entry: ReadyRow, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Score the prompt tokens of one row, given logits `[scored, vocabulary]` at its first pending tokens.

    The result begins with the row's first token, unless that is the first of the prompt.
    """
    sequence, pending = entry.sequence, entry.row.pending
    before, sequence.prompt_end = sequence.prompt_end, None
    if not len(logits) and before is None:
        return ()
    tokens = pending[1 : len(logits) + 1]
    if len(logits) == len(pending):  # the last logits score the first token of the next chunk
        logits, sequence.prompt_end = logits[:-1], logits[-1:].clone()
    if before is not None:
        logits, tokens = torch.cat((before, logits)) if len(logits) else before, (pending[0], *tokens)
    count = sequence.start.sampling.prompt_logprobs or 0
    return token_logprobs(logits, tokens, [count] * len(tokens))
