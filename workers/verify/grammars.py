"""The grammars of the sequences that the engine stores."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

import torch
from llguidance import LLMatcher
from torch import distributed

from cluster.core.bounds import MAX_LISTED_TOKENS, MAX_LISTED_VOCABULARY, MAX_TREE_DEPTH
from cluster.core.drafting import ANY_TOKENS, ListedTokens, NextTokens, Proposal
from cluster.core.tree import EMPTY_TREE
from cluster.core.verification import VerifyRow
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.context import Branch
from workers.sampling.grammar import Attempt, GrammarCompiler, GrammarError, GrammarLimitError, GrammarMatcher
from workers.verify.sequence_state import SequenceState

WAIT_SECONDS = 0.02
"""Longest time for which a step waits until new grammars are compiled, in seconds."""
ALONE_SECONDS = 0.25
"""Longest wait of a step in which every row needs a grammar that is not compiled, in seconds."""


class Outcome(IntEnum):
    """What is known of a row's grammar. The largest outcome of all ranks holds on all of them."""

    WHOLE = 0
    """What it allows at the root of the row's tree and at each node."""
    ROOT = 1
    """What it allows at the root: with the tree it is too complex."""
    WAITS = 2
    """Nothing, because it is being compiled. The row may be sent again."""
    FAILED = 3
    """Why the row cannot be served."""


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """What a grammar allows at the decisions of a row."""

    outcome: Outcome = Outcome.WHOLE
    allowed: tuple[AllowedTokens | None, ...] = ()
    """At the root and, with `WHOLE`, at each node of the tree; empty without a grammar."""
    reason: str = ""
    """Why it failed."""

    def agreed(self, outcome: Outcome) -> GrammarMasks:
        """Return what remains with the outcome that all ranks agree on."""
        if outcome is self.outcome:
            return self
        if outcome is Outcome.ROOT:
            return replace(self, outcome=outcome, allowed=self.allowed[:1])
        return GrammarMasks(outcome, reason="it is too complex for another rank")


_NO_GRAMMAR = GrammarMasks()


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
        self._late: set[Future[LLMatcher]] = set()
        """Compilations that an earlier step has waited for in vain."""
        if directory is not None:
            self._compiler = GrammarCompiler(directory, vocabulary_size, eos_token_ids)

    def begin(self, rows: Sequence[tuple[VerifyRow, SequenceState]]) -> list[GrammarMasks]:
        """Return of each row of a step whether it waits for its grammar or cannot be served, without what is allowed.

        All ranks call this and agree. Grammars are compiled in a thread. The step waits for them, but not so long that
        other rows suffer.
        """
        self._compile(rows)
        return self._agreed(rows, [self._begin(row, sequence) for row, sequence in rows])

    def masks(self, rows: Sequence[tuple[VerifyRow, SequenceState]]) -> list[GrammarMasks]:
        """Return what is allowed at the decisions of each row of a step. All ranks call this and agree on the outcomes.

        Call it after `begin`, for the rows that can be served.
        """
        return self._agreed(rows, [self._find(row, sequence) for row, sequence in rows])

    def _agreed(self, rows: Sequence[tuple[VerifyRow, SequenceState]], found: list[GrammarMasks]) -> list[GrammarMasks]:
        """What all ranks agree on, given what this one has found."""
        constrained = [index for index, (row, sequence) in enumerate(rows) if _is_constrained(row, sequence)]
        if self._ranks == 1 or not constrained:
            return found
        # The limits of matchers are counted, not timed. But the counts depend on everything that copies have read, and
        # the first rank alone reads drafts in `pruned`.
        outcomes = torch.tensor([found[index].outcome for index in constrained], dtype=torch.int32)
        distributed.all_reduce(outcomes, op=distributed.ReduceOp.MAX)
        for index, outcome in zip(constrained, outcomes.tolist(), strict=True):
            found[index] = found[index].agreed(Outcome(outcome))
        return found

    def forced(self, sequence: SequenceState, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that the grammar forces after a verdict with `tokens`, but none after the answer's end.

        All of `tokens` but the last are stored.
        """
        matcher, ends = _reads_drafts(sequence), sequence.start.sampling.end_token_ids
        if matcher is None or not tokens or tokens[-1] in ends:
            return ()
        try:
            matcher.follow(Branch(sequence.tokens, tokens[-1:]), len(sequence.tokens) + 1)
            return matcher.forced(MAX_TREE_DEPTH)
        except GrammarError:
            return ()  # the next row shows it

    def next_tokens(self, sequence: SequenceState, forced: tuple[int, ...]) -> NextTokens:
        """Return what the grammar says of the tokens after a verdict, of which `forced` are known.

        Call it after `forced`.
        """
        mask = _allowed_after(sequence, forced)
        return ANY_TOKENS if mask is None else NextTokens(forced, mask.numpy().tobytes())

    def following(self, sequence: SequenceState, forced: tuple[int, ...]) -> ListedTokens | None:
        """Return what the grammar allows after a verdict and the tokens `forced`, as a short list; `None`: not known.

        Call it after `forced`.
        """
        mask = _allowed_after(sequence, forced)
        return None if mask is None or len(mask) > MAX_LISTED_VOCABULARY else listed_tokens(mask)

    def pruned(self, proposal: Proposal | None, sequence: SequenceState) -> Proposal | None:
        """Return a draft for the next step without the nodes that the grammar excludes.

        A draft whose nodes have distributions, or that must be verified whole, stays as it is.
        """
        matcher = _reads_drafts(sequence)
        if proposal is None or matcher is None or not proposal.is_prunable or proposal.distributions:
            return proposal
        kept = matcher.possible(proposal.tree)
        return proposal if len(kept) == len(proposal.tree) else proposal.subset(kept)

    def _compile(self, rows: Sequence[tuple[VerifyRow, SequenceState]]) -> None:
        """Begin to compile what the rows need and wait for it."""
        if self._compiler is None:
            return
        used: set[Future[LLMatcher]] = set()
        needed: list[Future[LLMatcher]] = []
        for row, sequence in rows:
            if sequence.start.sampling.grammar is None:
                continue
            compilation = self._compilation(self._compiler, sequence)
            if compilation is not None:
                used.add(compilation)
                needed.extend([compilation] if row.decide else [])
        self._compiler.drop_unused(used)
        if needed and len(needed) == len(rows):
            wait(needed, ALONE_SECONDS)
        else:
            wait([one for one in needed if one not in self._late], WAIT_SECONDS)
        self._late = {one for one in needed if not one.done()}

    def _compilation(self, compiler: GrammarCompiler, sequence: SequenceState) -> Future[LLMatcher] | None:
        """Return the compilation that the next matcher of a sequence is made of; `None` if it needs none."""
        grammar, matcher = sequence.start.sampling.grammar, sequence.grammar
        if grammar is None or (matcher is not None and not matcher.is_broken):
            return None
        if matcher is not None:
            compiler.forget(grammar, matcher)
        return compiler.compile(grammar, own=_next_attempt(matcher) >= Attempt.OWN)

    def _begin(self, row: VerifyRow, sequence: SequenceState) -> GrammarMasks:
        """Return whether a row can be served, as far as this rank finds it: whether its sequence has a matcher."""
        if not _is_constrained(row, sequence):
            return _NO_GRAMMAR
        try:
            return GrammarMasks(Outcome.WAITS) if self._matcher(sequence) is None else _NO_GRAMMAR
        except GrammarError as error:
            return GrammarMasks(Outcome.FAILED, reason=str(error))

    def _find(self, row: VerifyRow, sequence: SequenceState) -> GrammarMasks:
        """Return what is allowed at the decisions of a row, as far as this rank finds it."""
        if not _is_constrained(row, sequence):
            return _NO_GRAMMAR
        try:
            matcher = self._matcher(sequence)
            if matcher is None:
                return GrammarMasks(Outcome.WAITS)
            matcher.follow(Branch(sequence.tokens, row.pending), row.base_len)
            allowed = matcher.allowed(EMPTY_TREE if _reads_drafts(sequence) is None else row.tree)
        except GrammarLimitError as error:
            if _is_last(sequence.grammar):
                return GrammarMasks(Outcome.FAILED, reason=str(error))
            return GrammarMasks(Outcome.WAITS)  # the next step compiles it anew
        except GrammarError as error:
            return GrammarMasks(Outcome.FAILED, reason=str(error))
        matcher.has_served = True
        return GrammarMasks(Outcome.WHOLE if len(allowed) == 1 + len(row.tree) else Outcome.ROOT, allowed)

    def _matcher(self, sequence: SequenceState) -> GrammarMatcher | None:
        """Return the matcher of a sequence, a new one if it has none or a broken one; `None` while that is compiled.

        Raises `GrammarError`.
        """
        grammar = sequence.start.sampling.grammar
        if self._compiler is None or grammar is None:
            raise GrammarError("this target has no tokenizer")
        compilation = self._compilation(self._compiler, sequence)
        if compilation is not None:
            if not compilation.done():
                return None
            attempt = _next_attempt(sequence.grammar)
            sequence.grammar = self._compiler.matcher(grammar, sequence.start.prompt_len, attempt)
        return sequence.grammar


def _is_constrained(row: VerifyRow, sequence: SequenceState) -> bool:
    return row.decide and sequence.start.sampling.grammar is not None


def _next_attempt(matcher: GrammarMatcher | None) -> Attempt:
    """Return what follows an answer after a broken matcher, or after none."""
    return Attempt.SHARED if matcher is None else Attempt(min(matcher.attempt + 1, Attempt.WITHOUT_DRAFTS))


def _is_last(matcher: GrammarMatcher | None) -> bool:
    """Whether the failure of a matcher is one of the answer: it has read nothing else, from the beginning."""
    return matcher is not None and matcher.attempt is Attempt.WITHOUT_DRAFTS and not matcher.has_served


def _reads_drafts(sequence: SequenceState) -> GrammarMatcher | None:
    """Return the matcher of a sequence if it may read drafts."""
    matcher = sequence.grammar
    return None if matcher is None or matcher.attempt is Attempt.WITHOUT_DRAFTS else matcher


def _allowed_after(sequence: SequenceState, forced: tuple[int, ...]) -> torch.Tensor | None:
    """What the grammar allows after a verdict and the tokens `forced`, bool [vocabulary]; `None`: not known."""
    matcher = _reads_drafts(sequence)
    if matcher is None:
        return None
    try:
        return matcher.allowed_after(forced).mask
    except GrammarError:
        return None  # the next row shows it


def listed_tokens(mask: torch.Tensor) -> ListedTokens:
    """The tokens that `mask`, bool [vocabulary], allows: by the list of them or of the others, whichever is short.

    Where both are too long for a message, none is excluded.
    """
    count = int(mask.count_nonzero())
    are_allowed = count <= MAX_LISTED_TOKENS
    is_short = are_allowed or len(mask) - count <= MAX_LISTED_TOKENS
    listed = (mask if are_allowed else ~mask).nonzero().flatten().tolist() if is_short else ()
    return ListedTokens(len(mask), tuple(listed), are_allowed)
