"""The records of the target's engine: what it stores for a sequence, and a row that is ready for the forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cluster.core.request import SequenceStart
from cluster.core.verification import Verdict, VerifyRow
from workers.forward.runner import ForwardRow
from workers.kv.block_table import BlockTable
from workers.kv.sources import StoredSource, source_salt
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.bad_texts import BadTexts
from workers.sampling.context import Branch, DecisionContext, RowDecisions
from workers.sampling.grammar import GrammarMatcher


@dataclass(slots=True)
class SequenceState:
    """What the engine stores for one sequence."""

    start: SequenceStart
    table: BlockTable
    last_row: VerifyRow | None = None
    """The row that was computed last."""
    last_verdict: Verdict | None = None
    """The verdict on `last_row`, which is returned again when the row is repeated."""
    source: StoredSource | None = None
    """What the sequence reads by cross-attention; `None` without an encoder, and until its first row."""
    prompt_end: torch.Tensor | None = None
    """Logits `[1, vocabulary]` at the end of a prompt chunk, if the next token of the prompt is to be scored."""
    grammar: GrammarMatcher | None = None
    """Follows the answer through its grammar, from the first decision on."""
    bad_texts: BadTexts | None = None
    """The texts that the answer must not contain, from the first decision on."""

    @property
    def tokens(self) -> list[int]:
        """The tokens whose KV is stored."""
        return self.table.tokens

    def repeated(self, row: VerifyRow) -> Verdict | None:
        """The verdict on this row if it was computed last, so that its tokens are stored: messages are idempotent."""
        return self.last_verdict if row.start_len < len(self.tokens) and row == self.last_row else None


def sequence_salt(start: SequenceStart) -> str:
    """The salt of the sequence's own keys and values, which depend on its source too."""
    return source_salt(start.cache_salt, start.source, "text") if start.source else start.cache_salt


@dataclass(frozen=True, slots=True)
class ReadyRow:
    """A row whose blocks are reserved, ready for the forward pass."""

    row: VerifyRow
    sequence: SequenceState
    forward: ForwardRow
    scored: int = 0
    """How many of the first selected logits score tokens of the prompt. The others are those of the decisions."""
    allowed: tuple[AllowedTokens | None, ...] = ()
    """What grammar and bad texts allow at each decision; empty without them."""
    sent: VerifyRow | None = None
    """The row as it was sent, where `row` has only a part of its tree."""
    fault: Verdict | None = None
    """The verdict on a row that was computed and cannot be decided."""

    def decisions(self) -> RowDecisions:
        """What the row's decisions are made with: at the last pending token, then at every node that was computed.

        Those at nodes that `row` has no more are not used, and may choose any token.
        """
        start, text = self.sequence.start, Branch(self.sequence.tokens, self.row.pending)
        allowed = self.allowed
        if allowed:
            allowed = (*allowed, *[None] * (len(self.forward.tree) - len(self.row.tree)))
        return RowDecisions(start.sampling, text, start.prompt_len, self.forward.tree, allowed)

    def contexts(self) -> tuple[DecisionContext, ...]:
        """One context per decision; none if the row decides nothing."""
        row = self.decisions()
        return tuple(row.context(decision) for decision in range(len(row))) if self.row.decide else ()
