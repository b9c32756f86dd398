"""The inputs of a decision besides the logits."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, overload

from cluster.core.request import SamplingParameters, ThinkingBudget
from cluster.core.tree import EMPTY_TREE, TokenTree

if TYPE_CHECKING:  # drafting methods, which the control plane names, load without torch
    from workers.sampling.allowed_tokens import AllowedTokens

_LATEST_START = 4
"""Most tokens in front of those that begin the thinking of a model, such as line ends."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, because dividing logits by a smaller number overflows float32."""
LEAST_REPETITION_PENALTY = 1e-6
"""Smaller repetition penalties count as this one, because dividing logits by them overflows float32."""


@dataclass(frozen=True, slots=True)
class DecisionContext:
    """The inputs, besides a row of logits, that decide the token at position `len(tokens)`."""

    sampling: SamplingParameters
    tokens: Sequence[int]
    """All tokens before the position: the prompt, the answer so far and the path in the tree."""
    prompt_len: int
    """Number of prompt tokens at the beginning of `tokens`."""
    allowed: AllowedTokens | None = None
    """What the grammar and the bad texts allow; `None` allows all tokens."""

    @property
    def position(self) -> int:
        """The absolute position of the decided token."""
        return len(self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen, without noise."""
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def repetition_penalty(self) -> float:
        """What positive logits of tokens seen before are divided by, and negative ones multiplied by."""
        return max(self.sampling.repetition_penalty, LEAST_REPETITION_PENALTY)

    @property
    def excluded_tokens(self) -> tuple[int, ...]:
        """Tokens that cannot be chosen: those that end an answer that is too short, and the ends of bad words and of
        repeated n-grams.

        An answer that is complete by its grammar ends, however short it is.
        """
        sampling = self.sampling
        is_short = sampling.min_tokens and len(self.tokens) - self.prompt_len < sampling.min_tokens
        is_short = is_short and not (self.allowed is not None and self.allowed.is_complete)
        ends = sampling.end_token_ids if is_short else ()
        if sampling.bad_words:
            ends = (*ends, *self._ends_of_bad_words())
        if sampling.no_repeat_ngram_size:
            ends = (*ends, *sampling.repeated_ngram_ends(tuple(self.tokens)))
        return ends

    @property
    def forced_token(self) -> int | None:
        """The only token that can be chosen, because the model has thought for long enough; `None` if there is none.

        Where a grammar refuses it, as within a character of several tokens, the end waits.
        """
        thinking = self.sampling.thinking
        token = None if thinking is None else forced_end(thinking, self.tokens, self.prompt_len)
        grammar = None if self.allowed is None else self.allowed.by_grammar
        is_refused = token is not None and grammar is not None and not grammar.permits(token)
        return None if is_refused else token

    def excludes(self, token: int) -> bool:
        """Whether the token cannot be chosen, whatever its logit."""
        forced, named = self.forced_token, self.sampling.allowed_token_ids
        if forced is not None:
            return token != forced
        is_left_out = bool(named) and token not in named
        if self.allowed is not None:
            is_left_out = is_left_out or not self.allowed.permits(token)
        return is_left_out or token in self.excluded_tokens

    def _ends_of_bad_words(self) -> Iterator[int]:
        """The last tokens of the bad words whose other tokens end the answer so far."""
        answer_len = len(self.tokens) - self.prompt_len
        longest = min(answer_len, max(map(len, self.sampling.bad_words)) - 1)
        recent = tuple(self.tokens[index] for index in range(len(self.tokens) - longest, len(self.tokens)))
        for *before, last in self.sampling.bad_words:
            if len(before) <= longest and recent[longest - len(before) :] == tuple(before):
                yield last

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p exclude some tokens."""
        return is_truncated(self.sampling)


def is_truncated(sampling: SamplingParameters) -> bool:
    """Whether top-k, top-p or min-p exclude some tokens. They exclude none where the best token is taken."""
    return sampling.temperature >= GREEDY_BELOW and bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p)


def forced_end(thinking: ThinkingBudget, tokens: Sequence[int], prompt_len: int) -> int | None:
    """Return the next token of the end of thinking, if the answer after the prompt still thinks with its budget spent.

    An end that the model has begun to write is continued.
    """
    if not thinking.end or len(tokens) - prompt_len < thinking.max_tokens + len(thinking.start):
        return None
    answer = tuple(tokens[prompt_len:])
    begin = 0
    if thinking.start:
        at = _find(answer[: _LATEST_START + len(thinking.start)], thinking.start)
        if at is None:
            return None
        begin = at + len(thinking.start)
    thought = answer[begin:]
    if len(thought) < thinking.max_tokens or _find(thought, thinking.end) is not None:
        return None
    written = range(min(len(thought), len(thinking.end) - 1), 0, -1)
    return thinking.end[next((count for count in written if thought[-count:] == thinking.end[:count]), 0)]


def _find(tokens: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Return the place of the first occurrence of `part`."""
    starts = (at for at, token in enumerate(tokens) if token == part[0])
    return next((at for at in starts if tokens[at : at + len(part)] == part), None)


@dataclass(frozen=True, slots=True)
class Branch(Sequence[int]):
    """`stem` followed by `path`. It does not copy the stem, because most decisions need only the length."""

    stem: Sequence[int]
    path: Sequence[int]

    def __len__(self) -> int:
        return len(self.stem) + len(self.path)

    def __iter__(self) -> Iterator[int]:
        return chain(self.stem, self.path)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return tuple(self)[index]
        position = range(len(self))[index]  # resolves negative indices; raises `IndexError` for those outside
        stem_len = len(self.stem)
        return self.stem[position] if position < stem_len else self.path[position - stem_len]


def tree_contexts(
    sampling: SamplingParameters,
    tokens: Sequence[int],
    prompt_len: int,
    tree: TokenTree,
    allowed: Sequence[AllowedTokens | None] = (),
) -> tuple[DecisionContext, ...]:
    """The contexts of one row's decisions: first at the root (after `tokens`), then at every node of `tree`.

    A node's context holds the tokens of its own path, so penalties do not count the tokens of its siblings. `allowed`
    has one entry per context, or none.
    """
    row = RowDecisions(sampling, tokens, prompt_len, tree, allowed)
    return tuple(row.context(decision) for decision in range(len(row)))


@dataclass(frozen=True, slots=True, eq=False)
class RowDecisions:
    """What the decisions of one row of a step are made with: first the one at the root, then those at every node."""

    sampling: SamplingParameters
    tokens: Sequence[int]
    """All tokens before the root's decision."""
    prompt_len: int
    tree: TokenTree = EMPTY_TREE
    allowed: Sequence[AllowedTokens | None] = ()
    """What the grammar and the bad texts allow at each decision; empty allows all tokens."""

    def __len__(self) -> int:
        return 1 + len(self.tree.tokens)

    def context(self, decision: int) -> DecisionContext:
        """The context of one decision: a node's holds the tokens of its own path, and none of its siblings'."""
        path = self.tree.path_tokens(decision - 1) if decision else ()
        tokens = Branch(self.tokens, path) if path else self.tokens
        allowed = self.allowed[decision] if self.allowed else None
        return DecisionContext(self.sampling, tokens, self.prompt_len, allowed)


class StepContexts(Sequence[DecisionContext]):
    """The contexts of the decisions of several rows, one row after another. Each is made when it is asked for.

    Few are, where parameters change no single logit: kernels then need the columns alone.
    """

    def __init__(self, rows: Sequence[RowDecisions]) -> None:
        self.rows = rows
        self.ends = list(accumulate(map(len, rows)))
        """The number of decisions of each row and those before it."""

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, index: int) -> DecisionContext: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[DecisionContext]: ...

    def __getitem__(self, index: int | slice) -> DecisionContext | Sequence[DecisionContext]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        place = range(len(self))[index]
        row = bisect_right(self.ends, place)
        return self.rows[row].context(place - (self.ends[row - 1] if row else 0))

    def __iter__(self) -> Iterator[DecisionContext]:
        return (row.context(decision) for row in self.rows for decision in range(len(row)))


def rows_of_contexts(contexts: Sequence[DecisionContext]) -> Sequence[RowDecisions]:
    """The rows that the contexts are of: those of `StepContexts`, else one row for each."""
    if isinstance(contexts, StepContexts):
        return contexts.rows
    return [
        RowDecisions(one.sampling, one.tokens, one.prompt_len, allowed=() if one.allowed is None else (one.allowed,))
        for one in contexts
    ]


def leaders_of(sampling: SamplingParameters) -> int:
    """Among this many of the largest logits is the one that is chosen; 0 where the others matter too.

    A greedy token has the largest logit of those that are not excluded. Whatever changes logits, draws, or reports
    probabilities needs them all, and so does any parameter that is not known here to leave the order of logits alone.
    """
    if sampling.temperature >= GREEDY_BELOW or _needs_all_logits(sampling) != _DEFAULTS:
        return 0
    ends = len(sampling.end_token_ids) if sampling.min_tokens else 0
    return 1 + ends + len(sampling.bad_words)


_EXCLUDING = {"min_tokens", "end_token_ids", "bad_words"}
"""Parameters that exclude a known number of tokens at most."""
_WITHOUT_EFFECT = {"temperature", "top_k", "top_p", "min_p", "seed", "logprob_token_ids"}
"""Parameters that change no greedy decision; `logprob_token_ids` is read with `logprobs` alone."""
_OTHERS = [field.name for field in fields(SamplingParameters) if field.name not in _EXCLUDING | _WITHOUT_EFFECT]
_needs_all_logits = attrgetter(*_OTHERS)
_DEFAULTS = _needs_all_logits(SamplingParameters())
_TOGETHER = _WITHOUT_EFFECT | {"end_token_ids", "logprobs", "prompt_logprobs", "grammar", "bad_texts"}
"""Parameters that change no single logit by themselves: grammars and bad texts do it by what they allow."""
_change_logits = attrgetter(*(field.name for field in fields(SamplingParameters) if field.name not in _TOGETHER))
_CHANGE_NONE = _change_logits(SamplingParameters())


def changes_logits(sampling: SamplingParameters) -> bool:
    """Whether parameters may change single logits, other than by temperature and truncation.

    So does any parameter that is not known here to change none.
    """
    return bool(_change_logits(sampling) != _CHANGE_NONE)


def common_leaders(samplings: Iterable[SamplingParameters]) -> int:
    """The number for several positions together; 0 if one of them needs all logits."""
    needed = [leaders_of(sampling) for sampling in samplings]
    return max(needed) if needed and all(needed) else 0
