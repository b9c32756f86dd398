"""The messages that travel between the rooms: frozen, and complete at birth.

Lengths are in tokens, times in seconds. A *committed* token is one that the target has decided
(or the client has sent); only committed tokens have a place in these lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cluster.core.errors import InvalidRequest
from cluster.core.ids import RequestId, SequenceId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the target's distribution at a position becomes one token.

    Applied in this order: penalties and bias, temperature, top-k, top-p, min-p. The result depends
    on nothing but the model, the tokens before the position, these values and the seed.
    """

    temperature: float = 1.0
    """0 takes the most probable token; otherwise logits are divided by it. Bound: 0 to 2."""
    top_k: int = 0
    """Keep the `top_k` most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches `top_p`; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less probable than `min_p` times the most probable one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divide positive and multiply negative logits of tokens seen in prompt or answer; in (0, 2]."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens seen in the answer; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the answer; in [-2, 2]."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added logit) pairs; values in [-100, 100]."""
    seed: int = 0
    """Unsigned 64-bit; the noise at a position is a pure function of it, the position and the token."""
    logprobs: int | None = None
    """How many most probable tokens to report beside the chosen one; `None` reports nothing."""


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    """When an answer ends."""

    max_tokens: int = 16
    """Most tokens the answer may have; at least 1."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the model's end-of-sequence tokens are among them unless ignored."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the answer, wherever they fall across tokens; cut from the text."""


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """What a worker must know once per sequence; rides on the sequence's first row."""

    prompt_len: int
    """How many of the first tokens are the prompt (penalties count the answer alone)."""
    sampling: SamplingParameters
    cache_salt: str = ""
    """Only sequences of one salt share stored keys and values: tenants cannot probe each other's prompts."""


# --- target -----------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural) at one position, of the model's own distribution before warping."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), most probable first."""


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
class KvOccupancy:
    """The target's paged pool, in blocks."""

    blocks_total: int
    blocks_free: int
    """Blocks that no sequence holds; what the prefix cache keeps in them gives way."""


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


# --- drafter ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """How large a tree may grow for one row."""

    max_nodes: int
    max_depth: int


NO_DRAFT = DraftBudget(0, 0)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Ask for guesses after `base_len` committed tokens; what was committed since rides along.

    The drafter must know at least `base_len - len(new_tokens)` tokens of this sequence; whatever it
    holds beyond is replaced by `new_tokens`, so a repeated or overtaken message does no harm.
    """

    sequence_id: SequenceId
    base_len: int
    new_tokens: tuple[int, ...]
    budget: DraftBudget
    start: SequenceStart | None = None
    """Present when `new_tokens` is the whole sequence."""

    @property
    def known_len(self) -> int:
        return self.base_len - len(self.new_tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree stamped with the committed length it grew from, or the reason for its absence."""

    sequence_id: SequenceId
    base_len: int
    tree: TokenTree = EMPTY_TREE
    fault: RowFault | None = None
    probabilities: tuple[float, ...] = ()
    """One per node: how likely it is that the committed text passes through it, as the drafter estimates; never more
    than its parent's. Empty where the drafter cannot tell."""
    ready: int = 0
    """How many of the nodes had been grown before they were asked for."""


# --- requests ---------------------------------------------------------------------------------


class EarlyStopping(Enum):
    """When a beam search ends, once it has as many finished answers as beams."""

    YES = "yes"
    """At once."""
    NO = "no"
    """When the best running beam, at its present length, scores no better than the worst finished answer."""
    NEVER = "never"
    """When no running beam can ever score better than the worst finished answer."""


@dataclass(frozen=True, slots=True)
class BeamParameters:
    """Beam search: the `width` most probable continuations are followed side by side."""

    width: int
    """At least 2."""
    length_penalty: float = 1.0
    """A finished answer scores its summed log-probability ÷ (its tokens ** length_penalty)."""
    early_stopping: EarlyStopping = EarlyStopping.NO


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the coordinator admits it: validated and tokenized."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingCriteria = field(default_factory=StoppingCriteria)
    deadline: float | None = None
    """On the coordinator's monotonic clock, in seconds; `None` never passes."""
    cache_salt: str = ""
    """See `SequenceStart`."""
    n: int = 1
    """Answers to the one prompt. The seed of answer `i` is the request's plus `i`, modulo 2**64."""
    beam: BeamParameters | None = None
    """Set: the `n` best answers of a beam search (`n` at most its width), instead of samples."""
    max_draft_tokens: int | None = None
    """Most nodes of a tree of guesses; 0 turns speculation off for this request, `None` leaves it to the server."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost."""

    prompt_tokens: int
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Tokens of the answer that a drafter wrote first."""
    target_steps: int = 0
    """Verdicts that decided tokens: `completion_tokens / target_steps` is the mean committed length."""

    @property
    def rejected_tokens(self) -> int:
        return self.drafted_tokens - self.accepted_tokens


@dataclass(frozen=True, slots=True)
class Commit:
    """What one verdict added to one answer; the unit of emission."""

    tokens: tuple[int, ...]
    accepted: int
    """How many of the leading `tokens` a drafter wrote first (the rest are the target's own)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Set with `finish`."""
    drafted: int = 0
    """Nodes in the tree that was verified for it: whoever ends an answer early still knows its cost."""
    index: int = 0
    """Which of the request's `n` answers it belongs to; each has one commit with `finish`."""
