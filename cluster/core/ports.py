"""The ports of the workers: to the coordinator, and from target or drafter to a drafting method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cluster.core.drafting import ANY_TOKENS, DraftRow, HiddenStates, NextTokens, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.verification import LearningStatus, OpenResult, OpenRow, StepBatch, StepResult, TargetInfo


class Drafter(Protocol):
    """Proposes drafts. A late, wrong or dead drafter affects only the speed."""

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """Return one proposal per row, in order. Raises `DrafterUnavailable`."""

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Release the sequences; unknown ones are not an error. Raises `DrafterUnavailable`."""


@runtime_checkable
class LearnsElsewhere(Protocol):
    """A `Drafter` that says what it has learned."""

    @property
    def learned(self) -> LearningStatus | None:
        """What it had learned at its last proposal; `None` where it does not learn."""


class Target(Protocol):
    """Verifies drafts and decides tokens. Only its verdicts commit a token."""

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Create sequences with as much of their KV as is stored already. The call may be repeated.

        Raises `TargetUnavailable`.
        """

    async def step(self, batch: StepBatch) -> StepResult:
        """Compute the rows in one forward pass. A repeated row returns the same verdict.

        Raises `TargetUnavailable`.
        """

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free the sequences' blocks; unknown sequences are not an error. Raises `TargetUnavailable`."""

    async def release_all(self) -> None:
        """Free all sequences of this coordinator. One that starts calls this before anything else.

        Raises `TargetUnavailable`.
        """

    async def info(self) -> TargetInfo:
        """Return the description of this target. Raises `TargetUnavailable`."""


class DraftMethod(Protocol):
    """Proposes drafts, on the target's rank 0 or in a process of its own. Synchronous, used by one thread."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Commit each row's new tokens and draft a tree after them. Returns one proposal per row, in order.

        The rows are of distinct sequences. A row that cannot be served gets a fault and does not affect the others.
        Repeating a row repeats its proposal.
        """

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Free everything that is stored for the sequences. Unknown sequences are no error."""


@dataclass(frozen=True, slots=True)
class TargetPart:
    """A part of the target's layers, which are numbered from 0."""

    layers: int | None = None
    """The part ends after this many layers; `None`: after the last."""
    skip_attention: frozenset[int] = frozenset()
    """Layers whose attention is left out."""
    skip_mlp: frozenset[int] = frozenset()
    """Layers whose feed-forward network is left out."""
    exit_norm: tuple[float, ...] = ()
    """Weights `[hidden size]` of the norm before the head; empty: those of the target's final norm."""


@dataclass(frozen=True, slots=True)
class DraftedPath:
    """Tokens after the stored ones of a sequence: the last committed token, then drafted ones."""

    sequence_id: SequenceId
    tokens: tuple[int, ...]
    computed: int = 0
    """How many of the tokens earlier draft passes have computed."""
    next_tokens: NextTokens = ANY_TOKENS
    """What the sequence's grammar says of the tokens after the last committed one."""


class DraftPasses(Protocol):
    """Passes through a part of the target, over the sequences that it stores. Nothing of them is committed.

    With several ranks, every rank makes the same calls in the same order and gets the same tokens.
    """

    @property
    def has_probabilities(self) -> bool:
        """Whether tokens have probabilities. With several ranks they have none: each rank has a part of the logits."""

    def sampling(self, sequence_id: SequenceId) -> SamplingParameters | None:
        """The sampling parameters of a stored sequence; `None` if it is not stored."""

    def reserved(self, lengths: Mapping[SequenceId, int]) -> AbstractContextManager[frozenset[SequenceId]]:
        """Reserve KV blocks for `lengths[id]` tokens after the stored ones of each sequence, and free them on exit.

        Yields the ids for which this succeeded. Sequences that are not stored, or without room, are missing.
        """

    def next_tokens(self, paths: Sequence[DraftedPath], count: int) -> list[tuple[tuple[int, float], ...]]:
        """Compute the paths in one pass. Returns the best `count` tokens after each, best first, with probabilities.

        The probability is the part's own confidence. Without probabilities, it is 1 and there is one token at most. No
        token is returned that the path's grammar excludes, and none where all logits are NaN or -inf.
        """


class DraftingTarget(Protocol):
    """A target whose layers a drafting method uses."""

    @property
    def layers(self) -> int:
        """Number of layers; of an encoder-decoder model, those of the decoder."""

    def passes(self, part: TargetPart) -> DraftPasses:
        """Passes through this part. Raises `ConfigurationError` if the target has no such part."""


@runtime_checkable
class DraftsByTarget(Protocol):
    """A `DraftMethod` that drafts with the target's layers. With several ranks, it runs on each of them."""

    def bind(self, target: DraftingTarget) -> None:
        """Use this target from now on. It is called once, before the first proposal. Raises `ConfigurationError`."""


class SourceStates(Protocol):
    """What the encoder of a target says of the sources that its sequences read."""

    def of(self, source: Sequence[int], salt: str) -> HiddenStates | None:
        """The encoder's output for a source with this cache salt; `None` where only keys and values are stored."""


@runtime_checkable
class ReadsSourceStates(Protocol):
    """A `DraftMethod` that reads the output of the target's encoder, if it drafts on the target."""

    def read_sources_from(self, states: SourceStates) -> None:
        """Use these states from now on. It is called once, before the first proposal."""


@runtime_checkable
class ReadsHiddenStates(Protocol):
    """A `DraftMethod` that says when it reads the target's hidden states. Others may read them at any time."""

    @property
    def reads_hidden(self) -> bool:
        """Whether a later proposal will read hidden states of the next step."""
