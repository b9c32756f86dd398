"""Messages between coordinator, target and drafter about drafts: rows to draft for, budgets, proposals, evidence.

Lengths are in tokens. A drafter sees committed tokens and, if its method asks for it, evidence: what the target's own
forward passes showed of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from cluster.core.draft_origin import DraftOrigin
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree


class RowFaultCode(Enum):
    """Why one row was not computed. The other rows of the batch are not affected."""

    OUT_OF_SYNC = "out_of_sync"
    """The worker does not hold the tokens before the row. Send the sequence from its start."""
    KV_EXHAUSTED = "kv_exhausted"
    """No block is free. Send the row again when other sequences have released theirs."""
    INVALID = "invalid"
    """The row is invalid, for example a token is outside the vocabulary. Only its request fails."""
    NOT_READY = "not_ready"
    """The row's grammar is still being compiled. Send the row again."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row was not computed. The message is for the log."""

    code: RowFaultCode
    message: str
    stored_len: int = 0
    """Tokens that the worker holds of the sequence."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """The largest draft tree for one row."""

    max_nodes: int
    max_depth: int

    def within(self, max_nodes: int, max_depth: int) -> DraftBudget:
        """The part that a tree of at most these sizes can use. Its depth is 0 where it allows no node."""
        nodes = max(0, min(self.max_nodes, max_nodes))
        return DraftBudget(nodes, max(0, min(self.max_depth, max_depth, nodes)))


NO_DRAFT = DraftBudget(0, 0)
EVIDENCE_ONLY = DraftBudget(0, 1)
"""No draft, but a drafter on the target keeps the row's hidden states, if it reads any, as context of a later draft."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of the target at consecutive positions: bfloat16 `[tokens, width]`, row-major, little-endian.

    A row is the concatenation of the target's taps. Tap `l` is the residual stream after `l` decoder layers: tap 0 is
    the embedding, and the last tap is the input of the final norm.
    """

    first: int
    """Position of the first row."""
    width: int
    """Values per position: number of taps × hidden size."""
    data: bytes | memoryview
    """`tokens * width * 2` bytes."""

    def __len__(self) -> int:
        return len(self.data) // (2 * self.width)

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + len(self)

    def latest(self, count: int) -> HiddenStates:
        """Return the last `count` positions."""
        dropped = max(0, len(self) - count)
        return HiddenStates(self.first + dropped, self.width, self.data[2 * self.width * dropped :])


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one step of the target showed of a sequence, beyond the tokens that it committed."""

    base_len: int
    """Committed length before the step's tree."""
    tree: TokenTree = EMPTY_TREE
    """The draft tree that was verified."""
    decisions: tuple[int, ...] = ()
    """The target's decision after the root and after every node, `[nodes + 1]`; -1 where it has none. Empty if nothing
    was decided, or if no method needs the decisions."""
    top: tuple[tuple[int, ...], ...] = ()
    """The target's most probable tokens at the root and at each accepted node, `[1 + accepted][k]`, best first. Empty
    if no method needs them."""
    hidden: HiddenStates | None = None
    """Hidden states of the tokens whose KV the step stored: the pending ones and the accepted ones."""


Tap = int | Literal["middle"]
"""Names hidden states of a target by its number of layers L: tap `l` is the residual stream after `l` decoder layers,
0 the embedding, -1 the same as L, -2 as L - 1, and `middle` as L // 2."""


@dataclass(frozen=True, slots=True)
class EvidenceNeeds:
    """The evidence that a drafting method needs."""

    taps: tuple[Tap, ...] = ()
    """Taps of the hidden states that it reads."""
    top: int = 0
    """Number of most probable tokens at the root and at each accepted node."""
    decisions: bool = False
    """Whether the decisions at all nodes are needed."""
    fusion: str = ""
    """Directory of a draft that fuses the taps, in their order, to one feature of each position before anything else;
    empty: it reads the taps themselves. A target may then send features."""

    @property
    def any(self) -> bool:
        """Whether anything is needed."""
        return bool(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """What is needed, in words."""
        needs = (("hidden states", self.taps), ("ranked tokens", self.top), ("decisions", self.decisions))
        return tuple(name for name, value in needs if value)


@dataclass(frozen=True, slots=True)
class DescribedMethod:
    """A drafting method of a drafter, for its clients."""

    name: str
    needs: EvidenceNeeds


@dataclass(frozen=True, slots=True)
class DraftDistribution:
    """The truncated distribution that a drafted token was drawn from, given its parent.

    Siblings have the same distribution. They are drawn without replacement: each from the distribution without the
    earlier siblings, normalised.
    """

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    """One per token of `tokens`; their sum is 1."""


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """Tokens that may be at a place, by a short list: of themselves, or of all others of the vocabulary.

    Where both lists are long, none is excluded.
    """

    vocabulary_size: int
    tokens: tuple[int, ...]
    """The list, ascending: at most `MAX_LISTED_TOKENS`."""
    are_allowed: bool
    """Whether the listed tokens may be there. Otherwise all others may."""

    def permits(self, token: int) -> bool:
        """Whether a token may be at the place; none beyond the vocabulary may."""
        return token < self.vocabulary_size and (token in self.tokens) == self.are_allowed

    def mask(self) -> bytes:
        """For each token of the vocabulary, 1 if it may be at the place and 0 if not."""
        found = bytearray([not self.are_allowed]) * self.vocabulary_size
        for token in self.tokens:
            found[token] = self.are_allowed
        return bytes(found)


@dataclass(frozen=True, slots=True)
class NextTokens:
    """What the grammar of a sequence says of its next tokens. A draft that ignores it is only less useful."""

    forced: tuple[int, ...] = ()
    """The next tokens, as far as the grammar allows one alone at each place."""
    allowed: bytes = b""
    """For each token of the vocabulary, 1 if it may follow them and 0 if not. Empty for a drafter elsewhere."""
    listed: ListedTokens | None = None
    """What may follow them, for a drafter elsewhere. `None` if that is unknown, or `allowed` says it."""

    def permits(self, depth: int, token: int) -> bool:
        """Whether a token may be at a depth of a draft, from 0; a place behind what is known permits all.

        A token beyond the vocabulary is never known to be allowed.
        """
        if depth < len(self.forced):
            return token == self.forced[depth]
        if depth > len(self.forced):
            return True
        if self.listed is not None:
            return self.listed.permits(token)
        return not self.allowed or self.allowed[token : token + 1] == b"\1"

    def permitted(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens of a draft before the first one that the grammar excludes."""
        known = range(min(len(tokens), len(self.forced) + 1))
        return tokens[: next((depth for depth in known if not self.permits(depth, tokens[depth])), len(tokens))]

    def mask(self) -> bytes:
        """For each token of the vocabulary, 1 if it may follow `forced` and 0 if not; empty: nothing is known."""
        return self.allowed if self.listed is None else self.listed.mask()

    def below(self, size: int | None) -> NextTokens:
        """What is known before the first forced token from `size` on, which a drafter with so many tokens cannot read.

        `None` is a drafter that reads all tokens.
        """
        if size is None or max(self.forced, default=-1) < size:
            return self
        return NextTokens(self.forced[: next(place for place, token in enumerate(self.forced) if token >= size)])


ANY_TOKENS = NextTokens()
"""Nothing is known, or there is no grammar."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A request for a draft after `base_len` committed tokens, with the tokens committed since the previous request.

    The drafter must hold at least `known_len` tokens of this sequence. `new_tokens` replaces what it holds beyond them,
    so a repeated or late message changes nothing.
    """

    sequence_id: SequenceId
    base_len: int
    new_tokens: tuple[int, ...]
    budget: DraftBudget
    start: SequenceStart | None = None
    """Set if `new_tokens` is the whole sequence."""
    evidence: tuple[Evidence, ...] = ()
    """What the target showed since the previous row, oldest first. It may have gaps, because a target that finds the KV
    of a prefix does not compute it."""
    next_tokens: NextTokens = ANY_TOKENS
    """What the sequence's grammar says of the draft's first tokens. A drafter elsewhere is sent lists, but no mask."""

    @property
    def known_len(self) -> int:
        """Tokens that the drafter must already hold."""
        return self.base_len - len(self.new_tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A draft tree after `base_len` committed tokens, or the fault that prevented it."""

    sequence_id: SequenceId
    base_len: int
    tree: TokenTree = EMPTY_TREE
    fault: RowFault | None = None
    probabilities: tuple[float, ...] = ()
    """Estimated probability, per node, that all tokens down to the node are accepted. It never exceeds the parent's.
    Empty if the drafter has no estimate."""
    ready: int = 0
    """Number of nodes that the drafter had computed before the request arrived."""
    distributions: tuple[DraftDistribution, ...] = ()
    """The distribution that each node's token was drawn from, for acceptance rules that need it. Empty if every token
    is a deterministic choice."""
    is_prunable: bool = True
    """Whether single nodes may be left out. Otherwise all nodes within the budget are verified, or none."""
    origins: tuple[DraftOrigin, ...] = ()
    """Where each node comes from. Empty if all nodes come from the request itself."""

    @property
    def node_origins(self) -> tuple[DraftOrigin, ...]:
        """Where each node comes from, one entry per node."""
        return self.origins or (DraftOrigin.REQUEST,) * len(self.tree)

    def subset(self, nodes: Sequence[int]) -> Proposal:
        """Return the proposal of `nodes`, which ascend. Raises `InvalidRequest` if a parent is not among them."""
        if len(nodes) == len(self.tree):
            return self
        return replace(
            self,
            tree=self.tree.subset(nodes),
            probabilities=tuple(self.probabilities[node] for node in nodes) if self.probabilities else (),
            distributions=tuple(self.distributions[node] for node in nodes) if self.distributions else (),
            ready=min(self.ready, len(nodes)),
            origins=tuple(self.origins[node] for node in nodes) if self.origins else (),
        )
