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
    """Create a sequence on the target, with as much of its KV as is already stored.

    The target searches for leading tokens of `tokens` in the parent's blocks, in the prefix cache and in the host and
    disk tiers. At least the last token is left to be computed, because a decision needs its logits.
    """

    sequence_id: SequenceId
    tokens: tuple[int, ...]
    """All committed tokens, at least one."""
    start: SequenceStart
    parent: SequenceId | None = None
    """A sequence with the same leading tokens. Its blocks are shared copy-on-write, also the last, half-filled one."""


@dataclass(frozen=True, slots=True)
class OpenResult:
    """How much KV was found for opened sequences."""

    stored_lens: tuple[int, ...]
    """Leading tokens whose KV the sequence holds now; one number per row, in the order of the rows."""
    kv: KvOccupancy


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """The tokens of one sequence in a step: committed tokens without stored KV, then a draft tree.

    The target must hold the KV of exactly `start_len` tokens before the step. With `start` set, it creates the
    sequence, and `start_len` is 0.
    """

    sequence_id: SequenceId
    base_len: int
    """Committed length including `pending`. The root of the tree is the token at position `base_len - 1`."""
    pending: tuple[int, ...]
    """The tokens at positions `start_len … base_len - 1`; at least one."""
    tree: TokenTree = EMPTY_TREE
    decide: bool = True
    """False for a prompt chunk that is not the last. No token is decided, and the tree is empty."""
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

    Raises `InvalidRequest` if two rows belong to the same sequence, because their order would matter.
    """

    rows: tuple[VerifyRow, ...]

    def __post_init__(self) -> None:
        seen: set[SequenceId] = set()
        for index, row in enumerate(self.rows):
            if row.sequence_id in seen:
                raise InvalidRequest(f"rows[{index}].sequence_id", row.sequence_id, "in one row only")
            seen.add(row.sequence_id)


class RowFaultCode(Enum):
    """Why one row was not computed. The other rows of the batch are not affected."""

    OUT_OF_SYNC = "out_of_sync"
    """The worker does not hold `start_len` tokens of this sequence. Send the sequence from its start."""
    KV_EXHAUSTED = "kv_exhausted"
    """No block is free. Send the row again when other sequences have released theirs."""
    INVALID = "invalid"
    """The row is invalid, for example a token is outside the vocabulary. Only its request fails."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row was not computed. The message is for the log."""

    code: RowFaultCode
    message: str
    stored_len: int = 0
    """Tokens that the worker holds of the sequence."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's decision on one row: the accepted path of the tree and one token of its own.

    `tokens` is empty if `decide` was false or `fault` is set. The target then stores `base_len + accepted` tokens.
    """

    sequence_id: SequenceId
    base_len: int
    tokens: tuple[int, ...] = ()
    drafted: int = 0
    """Nodes in the tree that was verified."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if requested."""
    fault: RowFault | None = None

    @property
    def accepted(self) -> int:
        """How many of `tokens` are accepted draft tokens. The last token is always the target's own."""
        return max(0, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step of the target."""

    verdicts: tuple[Verdict, ...]
    """One per row, in the order of the rows."""
    kv: KvOccupancy
    step_seconds: float = 0.0
    """Time that the target spent, without the transport."""


@dataclass(frozen=True, slots=True)
class StepSample:
    """The duration of one step, measured during warm-up."""

    rows: int
    tokens: int
    """Tokens of all rows together, including their pending tokens."""
    seconds: float


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """The description of a target."""

    model: str
    vocabulary_size: int
    max_context_len: int
    layout: KvLayout
    kv: KvOccupancy
    eos_token_ids: tuple[int, ...]
    tensor_parallel: int
    dtype: str
    epoch: str = ""
    """A random text, drawn at start. A changed epoch means that all KV stored before is lost."""
    profile: tuple[StepSample, ...] = ()
    """Step durations that warm-up measured; may be empty."""
    is_lossless: bool = True
    """Whether answers are exactly those of the model alone. False for a lossy acceptance rule or attention window."""
