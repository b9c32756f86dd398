"""Messages between coordinator and target: opening sequences, verifying rows, verdicts.

Lengths are in tokens, times in seconds. A *committed* token is one that the target has decided or the client has sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import SequenceStart, TokenLogprobs
from cluster.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class OpenRow:
    """Create a sequence anew on the target, with as much of its KV as is already stored somewhere.

    The target looks for leading tokens of `tokens` in the parent's blocks, in its prefix cache and
    in what was moved out; it keeps at least the last token out, so that there is something to decide on.
    """

    sequence_id: SequenceId
    tokens: tuple[int, ...]
    """All committed tokens, at least one."""
    start: SequenceStart
    parent: SequenceId | None = None
    """A sequence that begins alike: its blocks are shared copy-on-write, the last, half-filled one included."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    """What was found."""

    stored_lens: tuple[int, ...]
    """One per row, in the rows' order: leading tokens whose KV the sequence holds now."""
    kv: KvOccupancy


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One sequence's part in a step: committed tokens without stored KV, then a tree of guesses.

    The target must hold exactly `start_len` tokens' KV before the step; `start` creates the
    sequence anew (with `start_len == 0`).
    """

    sequence_id: SequenceId
    base_len: int
    """Committed length including `pending`: the tree's root is the token at `base_len - 1`."""
    pending: tuple[int, ...]
    """At least one token: those at positions `start_len … base_len - 1`."""
    tree: TokenTree = EMPTY_TREE
    decide: bool = True
    """False for a prompt chunk that is not the last: no decision is wanted (and no tree allowed)."""
    start: SequenceStart | None = None

    @property
    def start_len(self) -> int:
        """Tokens whose KV the target holds before the step."""
        return self.base_len - len(self.pending)

    @property
    def width(self) -> int:
        """Tokens this row adds to the forward pass."""
        return len(self.pending) + len(self.tree)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the target computes in one forward pass.

    Raises `InvalidRequest` when two rows are of one sequence: their order would matter.
    """

    rows: tuple[VerifyRow, ...]

    def __post_init__(self) -> None:
        seen: set[SequenceId] = set()
        for index, row in enumerate(self.rows):
            if row.sequence_id in seen:
                raise InvalidRequest(f"rows[{index}].sequence_id", row.sequence_id, "in one row only")
            seen.add(row.sequence_id)


class RowFaultCode(Enum):
    """Why one row was not computed; the other rows of its batch were."""

    OUT_OF_SYNC = "out_of_sync"
    """The worker does not hold `start_len` tokens of this sequence: send it from the start."""
    KV_EXHAUSTED = "kv_exhausted"
    """No free block: try again when others have released theirs."""
    INVALID = "invalid"
    """The row itself cannot be served (a token outside the vocabulary, say): only its request fails."""


@dataclass(frozen=True, slots=True)
class RowFault:
    code: RowFaultCode
    message: str
    stored_len: int = 0
    """What the worker does hold, in tokens."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's word on one row: the accepted path and one token of its own.

    `tokens` is empty when nothing was to be decided or when `fault` is set. After it the target
    stores `base_len + accepted` tokens.
    """

    sequence_id: SequenceId
    base_len: int
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    """Nodes in the tree that was verified."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, when asked for."""
    fault: RowFault | None = None

    @property
    def accepted(self) -> int:
        """How many of `tokens` a drafter wrote first; the last is always the target's own."""
        return max(0, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    verdicts: tuple[Verdict, ...]
    """One per row, in the rows' order."""
    kv: KvOccupancy
    step_seconds: float = 0.0
    """Time the target itself spent, without the wire."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """How long one step took, measured before anybody waited for it."""

    rows: int
    tokens: int
    """Of all rows together, their last committed tokens among them."""
    seconds: float


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What the coordinator must know of a target before it plans."""

    model: str
    vocabulary_size: int
    max_context_len: int
    layout: KvLayout
    kv: KvOccupancy
    eos_token_ids: tuple[int, ...]
    tensor_parallel: int
    dtype: str
    epoch: str = ""
    """Drawn at start: a changed epoch tells that everything stored before is gone."""
    profile: tuple[StepSample, ...] = ()
    """What warming up measured; empty where nothing was."""
    is_lossless: bool = True
    """Whether its verdicts are what the model alone would have written; false for experiments."""
