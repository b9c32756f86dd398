"""The grammars of the sequences that the engine stores."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

import torch
from torch import distributed

from cluster.core.bounds import MAX_TREE_DEPTH
from cluster.core.drafting import Proposal
from cluster.core.grammar import Grammar
from cluster.core.verification import VerifyRow
from workers.sampling.context import AllowedTokens, Branch
from workers.sampling.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from workers.verify.sequence_state import SequenceState

WAIT_SECONDS = 0.02
"""Longest time for which a step waits until grammars are compiled, in seconds."""
ALONE_SECONDS = 0.25
"""The same for a step in which every row needs a new grammar."""


class Grammars:
    """Finds what is allowed at the decisions of rows whose sequences have a grammar.

    A sequence that begins again, after a preemption or on another target, follows its answer from the beginning.
    """

    def __init__(
        self, directory: Path | None, vocabulary_size: int, eos_token_ids: Sequence[int], *, ranks: int = 1
    ) -> None:
        """`directory` has the model's tokenizer; `None` refuses grammars. `ranks` is the size of the group."""
        self._compiler = None
        self._ranks = ranks
        self._unready: frozenset[Grammar] = frozenset()
        """The grammars of the current step that are still compiled on some rank."""
        if directory is not None:
            self._compiler = GrammarCompiler(directory, vocabulary_size, eos_token_ids)

    def prepare(self, rows: Sequence[tuple[VerifyRow, SequenceState | None]]) -> None:
        """Begin to compile the new grammars of a step's rows, and wait for them, but not so long that others suffer.

        All ranks agree on those that are ready. A row whose grammar is not may be sent again.
        """
        self._unready = frozenset()
        if self._compiler is None:
            return
        deciding: list[Grammar] = []
        used: set[Grammar] = set()
        for row, sequence in rows:
            grammar = _new_grammar(row, sequence)
            if grammar is not None:
                self._compiler.compile(grammar)
                used.add(grammar)
                deciding.extend([grammar] if row.decide else [])
        self._compiler.drop_unused(used)
        if not deciding:
            return
        grammars = list(dict.fromkeys(deciding))
        compiled = [self._compiler.compile(grammar) for grammar in grammars]
        wait(compiled, ALONE_SECONDS if len(deciding) == len(rows) else WAIT_SECONDS)
        ready = torch.tensor([future.done() for future in compiled], dtype=torch.int32)
        if self._ranks > 1:
            distributed.all_reduce(ready, op=distributed.ReduceOp.MIN)
        self._unready = frozenset(one for one, is_ready in zip(grammars, ready.tolist(), strict=True) if not is_ready)

    def is_ready(self, row: VerifyRow, sequence: SequenceState) -> bool:
        """Whether what is allowed at the row's decisions can be found, after `prepare`."""
        return not row.decide or sequence.grammar is not None or sequence.start.sampling.grammar not in self._unready

    def allowed(self, row: VerifyRow, sequence: SequenceState) -> tuple[AllowedTokens | None, ...]:
        """Return what is allowed at the root of the row's tree and at each node; nothing without a grammar.

        Raises `GrammarError` if a new matcher fails too, which has read nothing but this answer and the tree.
        """
        start = sequence.start
        if not row.decide or start.sampling.grammar is None:
            return ()
        if self._compiler is None:
            raise GrammarError("this target has no tokenizer")
        if sequence.grammar is None:
            sequence.grammar = self._compiler.matcher(start.sampling.grammar, start.prompt_len)
        try:
            return _allowed(sequence.grammar, row, sequence)
        except GrammarError:
            sequence.grammar = self._compiler.own_matcher(start.sampling.grammar, start.prompt_len)
            return _allowed(sequence.grammar, row, sequence)

    def forced(self, sequence: SequenceState, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that the grammar forces after a verdict with `tokens`, but none after the answer's end.

        All of `tokens` but the last are stored.
        """
        matcher, ends = sequence.grammar, sequence.start.sampling.end_token_ids
        if matcher is None or not tokens or tokens[-1] in ends:
            return ()
        try:
            matcher.follow(Branch(sequence.tokens, tokens[-1:]), len(sequence.tokens) + 1)
            return matcher.forced(MAX_TREE_DEPTH)
        except GrammarError:
            return ()  # the next row's matcher fails, and a new one takes its place

    def pruned(self, proposal: Proposal | None, sequence: SequenceState) -> Proposal | None:
        """Return a draft for the next step without the nodes that the grammar excludes.

        A draft whose nodes have distributions, or that must be verified whole, stays as it is.
        """
        matcher = sequence.grammar
        if proposal is None or matcher is None or not proposal.is_prunable or proposal.distributions:
            return proposal
        kept = matcher.possible(proposal.tree)
        return proposal if len(kept) == len(proposal.tree) else proposal.subset(kept)


def _allowed(matcher: GrammarMatcher, row: VerifyRow, sequence: SequenceState) -> tuple[AllowedTokens | None, ...]:
    matcher.follow(Branch(sequence.tokens, row.pending), row.base_len)
    return matcher.allowed(row.tree)


def _new_grammar(row: VerifyRow, sequence: SequenceState | None) -> Grammar | None:
    """Return the grammar of a row whose answer does not follow it yet."""
    if sequence is None or (row.start is not None and row.start_len == 0):
        return None if row.start is None else row.start.sampling.grammar
    return sequence.start.sampling.grammar if sequence.grammar is None else None
