"""Messages between coordinator and target: opening sequences, verifying rows, verdicts.

Lengths are in tokens, times in seconds. A *committed* token is one that the target has decided or the client has sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cluster.core import bounds
from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftDistribution, Evidence, ListedTokens, Proposal, RowFault
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import USUAL_SCORING, BeamScoring, SequenceStart, TokenLogprobs
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
    distributions: tuple[DraftDistribution, ...] = ()
    """One per node of the tree, or none; see `Proposal.distributions`."""
    next_budget: DraftBudget = NO_DRAFT
    """Largest draft tree that a drafter on the target proposes after this row, for the next step. With `NO_DRAFT`, the
    step shows that drafter nothing of the row, and with `EVIDENCE_ONLY` its hidden states alone."""
    origins: tuple[DraftOrigin, ...] = field(default=(), compare=False)
    """See `Proposal.origins`. The coordinator counts by them; the target does not get them."""
    wants_following: bool = False
    """Whether the verdict is to say what the grammar of the sequence allows next, for a drafter elsewhere."""

    @property
    def node_origins(self) -> tuple[DraftOrigin, ...]:
        """Where each node of the tree comes from, one entry per node."""
        return self.origins or (DraftOrigin.REQUEST,) * len(self.tree)

    def accepted_origins(self, tokens: tuple[int, ...]) -> tuple[DraftOrigin, ...]:
        """Return where each of the accepted draft tokens `tokens` comes from."""
        if not tokens:
            return ()
        found = set(self.origins) or {DraftOrigin.REQUEST}
        if len(found) == 1:
            return (*found,) * len(tokens)
        return tuple(self.origins[node] for node in self.tree.follow(tokens))

    @property
    def start_len(self) -> int:
        """Tokens whose KV the target holds before the step."""
        return self.base_len - len(self.pending)

    @property
    def width(self) -> int:
        """Tokens this row adds to the forward pass."""
        return len(self.pending) + len(self.tree.tokens)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What the target computes in one forward pass.

    Raises `InvalidRequest` if two rows belong to the same sequence, because their order would matter.
    """

    rows: tuple[VerifyRow, ...]

    def __post_init__(self) -> None:
        bounds.distinct_rows(row.sequence_id for row in self.rows)


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
    evidence: Evidence | None = None
    """What the step showed of the sequence, for drafters in other processes; `None` if no such drafter needs any."""
    proposal: Proposal | None = None
    """The draft for the next step, from a drafter on the target. Its `base_len` is the length after this verdict."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If requested, one entry per prompt token among the row's pending ones, apart from the first of the prompt."""
    forced: tuple[int, ...] = ()
    """Tokens that follow `tokens` because the request's grammar allows no other one at each position."""
    following: ListedTokens | None = None
    """What the grammar allows after `forced`, if the row asked for it."""

    @property
    def accepted(self) -> int:
        """How many of `tokens` are accepted draft tokens. The last token is always the target's own."""
        return max(0, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class LearningStatus:
    """What a draft has learned from the texts it drafted for, since the start of its process."""

    version: int = 0
    """Highest number among the learned versions that draft; 0 for none."""
    clients: int = 0
    """Number of salts that have learned weights."""
    texts: int = 0
    """Number of texts that were collected to learn from."""
    text_bytes: int = 0
    """Memory that collected texts take, in bytes."""
    taken: int = 0
    """Number of trainings whose weights draft since then."""
    dropped: int = 0
    """Number of trainings whose weights were no better."""
    failed: int = 0
    """Number of trainings that did not end."""
    tokens_per_step_before: float = 0.0
    """Tokens per step of the target on held-back texts before the last training."""
    tokens_per_step: float = 0.0
    """Tokens per step of the target on held-back texts with the weights of the last training."""

    @classmethod
    def of_all(cls, drafters: Iterable[LearningStatus]) -> LearningStatus:
        """What several drafters have learned. At least one is needed.

        Counts of texts and trainings add up; clients and tokens per step are those of the drafter with the most
        trainings.
        """
        *others, best = sorted(drafters, key=lambda one: one.taken + one.dropped)
        return replace(
            best,
            version=max(one.version for one in (*others, best)),
            **{
                name: sum(getattr(one, name) for one in (*others, best))
                for name in ("texts", "text_bytes", "taken", "dropped", "failed")
            },
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step of the target."""

    verdicts: tuple[Verdict, ...]
    """One per row, in the order of the rows."""
    kv: KvOccupancy
    step_seconds: float = 0.0
    """Time that the target spent on the step, without the transport. If it was launched before its rows came, this
    begins with the launch, without the time for which its device then had nothing to do."""
    draft_seconds: float = 0.0
    """Part of `step_seconds` that the target spent on drafts for the next step."""
    learning: LearningStatus | None = None
    """What the draft on the target has learned; `None` where it does not learn."""

    @classmethod
    def of_parts(cls, parts: Sequence[StepResult], verdicts: tuple[Verdict, ...]) -> StepResult:
        """Return the result of a step that was computed in `parts`, at least one, one after another.

        `verdicts` are those of the whole step. Times add up; all else is the latest that a part says.
        """
        learning = [part.learning for part in parts if part.learning is not None]
        return replace(
            parts[-1],
            verdicts=verdicts,
            step_seconds=sum(part.step_seconds for part in parts),
            draft_seconds=sum(part.draft_seconds for part in parts),
            learning=learning[-1] if learning else None,
        )


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
    fingerprint: str = ""
    """A name of what answers depend on: weights, number format, kernels, ranks, and settings that are LOSSY."""
    dequantized_from: str = ""
    """What the weights were before they were de-quantized, as `GGUF Q4_1`; empty if they are as published."""
    decoder_start: tuple[int, ...] = ()
    """The prompt of every sequence of an encoder-decoder model: its start token and the forced tokens after it. Empty
    for a decoder-only model."""
    max_source_len: int = 0
    """Longest source that the encoder reads, in tokens; 0 for a decoder-only model."""
    forced_eos_token_id: int | None = None
    """The token that the model's generation configuration forces at the end of an answer of full length."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the model's generation configuration forbids in every answer."""
    no_repeat_ngram_size: int = 0
    """Length of the token sequences that the model's generation configuration forbids to repeat; 0: none."""
    min_tokens: int = 0
    """Fewest tokens of an answer whose request gives no number, as the model's generation configuration says."""
    beam_scoring: BeamScoring = USUAL_SCORING
    """What a beam search has whose request says nothing else, as the model's generation configuration says."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether sequences have a source, which an encoder reads."""
        return bool(self.decoder_start)
