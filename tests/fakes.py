"""Both ports of the coordinator in a few lines: a little language model that decides, and drafters of every character.

The model's next token is a pure hash of everything before it and the seed, so a wrong, missing or repeated token
anywhere changes all that follows: a stream equal to `FakeTarget.answer()` is right to the last token.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.errors import DrafterUnavailable, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from cluster.core.types import (
    DraftRow,
    GenerationRequest,
    KvOccupancy,
    OpenResult,
    OpenRow,
    Proposal,
    RowFault,
    RowFaultCode,
    SamplingParameters,
    SequenceStart,
    StepBatch,
    StepResult,
    TargetInfo,
    Verdict,
    VerifyRow,
)


@dataclass(slots=True)
class _Stored:
    start: SequenceStart
    tokens: list[int] = field(default_factory=list)
    answered: VerifyRow | None = None
    verdict: Verdict | None = None


class FakeTarget:
    """Holds its ground: checks every row against what it stores, out of a pool of blocks that can run out."""

    def __init__(
        self,
        *,
        vocabulary_size: int = 32,
        block_size: int = 4,
        blocks: int = 256,
        max_context_len: int = 512,
        step_delay: float = 0.0,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.block_size = block_size
        self.blocks = blocks
        self.max_context_len = max_context_len
        self.step_delay = step_delay
        self.stored: dict[SequenceId, _Stored] = {}
        self.batches: list[StepBatch] = []
        """Every batch that was computed."""
        self.faults: list[RowFault] = []
        """Every fault that was answered."""
        self.foreign_blocks = 0
        """Blocks that somebody else holds."""
        self.is_down = False
        self.fail_after_computing = 0
        """So many steps are computed and then break before they answer."""
        self._epoch = 0
        self._unhung = asyncio.Event()
        self._unhung.set()

    # --- the model ---

    def next_token(self, tokens: Sequence[int], sampling: SamplingParameters) -> int:
        """The decision after `tokens`; the seed counts unless the temperature is 0."""
        seed = sampling.seed if sampling.temperature > 0 else 0
        return zlib.crc32(array("I", tokens).tobytes(), seed & 0xFFFFFFFF) % self.vocabulary_size

    def answer(self, request: GenerationRequest) -> list[int]:
        """What plain decoding, one token at a time, writes."""
        tokens = list(request.prompt)
        while len(tokens) - len(request.prompt) < request.stopping.max_tokens:
            tokens.append(self.next_token(tokens, request.sampling))
            if tokens[-1] in request.stopping.stop_token_ids:
                break
        return tokens[len(request.prompt) :]

    # --- misfortune ---

    def crash(self) -> None:
        """Lose everything and answer nothing until `revive()`."""
        self.is_down = True
        self.stored.clear()

    def revive(self) -> None:
        """Come back, empty, in a new life."""
        self.is_down = False
        self.stored.clear()
        self._epoch += 1

    def hang(self) -> None:
        """Take calls and never answer, until `unhang()`."""
        self._unhung.clear()

    def unhang(self) -> None:
        """Answer again."""
        self._unhung.set()

    # --- the port ---

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds."""
        held = sum(self._blocks_for(len(stored.tokens)) for stored in self.stored.values())
        return self.blocks - self.foreign_blocks - held

    async def step(self, batch: StepBatch) -> StepResult:
        """See `Target`."""
        await self._answering()
        await asyncio.sleep(self.step_delay)
        self._check_alive()
        self.batches.append(batch)
        verdicts = tuple(self._verify(batch))
        if self.fail_after_computing:
            self.fail_after_computing -= 1
            raise TargetUnavailable("the answer was lost on its way")
        return StepResult(verdicts, KvOccupancy(self.blocks, self.blocks_free))

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `Target`."""
        await self._answering()
        for sequence_id in sequence_ids:
            self.stored.pop(sequence_id, None)

    async def release_all(self) -> None:
        """See `Target`."""
        await self._answering()
        self.stored.clear()

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """See `Target`. Finds nothing but what the parent stores."""
        await self._answering()
        for row in rows:
            parent = self.stored.get(row.parent) if row.parent is not None else None
            alike = 0
            if parent is not None:
                most = min(len(parent.tokens), len(row.tokens) - 1)
                alike = next((i for i in range(most) if parent.tokens[i] != row.tokens[i]), most)
            self.stored[row.sequence_id] = _Stored(row.start, list(row.tokens[:alike]))
        lens = tuple(len(self.stored[row.sequence_id].tokens) for row in rows)
        return OpenResult(lens, KvOccupancy(self.blocks, self.blocks_free))

    async def info(self) -> TargetInfo:
        """See `Target`."""
        await self._answering()
        return TargetInfo(
            model="fake",
            vocabulary_size=self.vocabulary_size,
            max_context_len=self.max_context_len,
            layout=KvLayout(self.block_size),
            kv=KvOccupancy(self.blocks, self.blocks_free),
            eos_token_ids=(),
            tensor_parallel=1,
            dtype="float32",
            epoch=str(self._epoch),
        )

    async def _answering(self) -> None:
        await self._unhung.wait()
        await asyncio.sleep(0)
        self._check_alive()

    def _check_alive(self) -> None:
        if self.is_down:
            raise TargetUnavailable("connection refused")

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _verify(self, batch: StepBatch) -> list[Verdict]:
        """All rows take their blocks first, as in one forward pass; then each is decided."""
        reserved = 0
        works: list[tuple[VerifyRow, _Stored | RowFault | Verdict]] = []
        for row in batch.rows:
            work = self._prepare(row, reserved)
            if isinstance(work, _Stored):
                reserved += self._blocks_for(row.base_len + len(row.tree)) - self._blocks_for(len(work.tokens))
            works.append((row, work))
        return [self._conclude(row, work) for row, work in works]

    def _prepare(self, row: VerifyRow, reserved: int) -> _Stored | RowFault | Verdict:
        stored = self.stored.get(row.sequence_id)
        if not row.pending or (row.tree.tokens and not row.decide):
            return RowFault(RowFaultCode.INVALID, "a row needs pending tokens, and a tree needs a decision")
        if max((*row.pending, *row.tree.tokens)) >= self.vocabulary_size:
            return RowFault(RowFaultCode.INVALID, "a token is outside the vocabulary")
        if row.base_len + row.tree.depth() > self.max_context_len:
            return RowFault(RowFaultCode.INVALID, "beyond the context")
        if stored is not None and stored.verdict is not None and row == stored.answered:
            return stored.verdict
        if row.start is not None and row.start_len == 0:
            stored = self.stored[row.sequence_id] = _Stored(row.start)
        if stored is None or row.start_len != len(stored.tokens):
            held = 0 if stored is None else len(stored.tokens)
            return RowFault(RowFaultCode.OUT_OF_SYNC, f"{held} tokens are stored, not {row.start_len}", held)
        needed = self._blocks_for(row.base_len + len(row.tree)) - self._blocks_for(len(stored.tokens))
        if needed > self.blocks_free - reserved:
            return RowFault(RowFaultCode.KV_EXHAUSTED, "no free block", len(stored.tokens))
        return stored

    def _conclude(self, row: VerifyRow, work: _Stored | RowFault | Verdict) -> Verdict:
        if isinstance(work, Verdict):
            return work
        if isinstance(work, RowFault):
            self.faults.append(work)
            return Verdict(row.sequence_id, row.base_len, fault=work)
        work.tokens.extend(row.pending)
        decided: list[int] = []
        node: int | None = ROOT
        while row.decide and node is not None:
            token = self.next_token([*work.tokens, *decided], work.start.sampling)
            decided.append(token)
            node = row.tree.child(node, token)
        work.tokens.extend(decided[:-1])
        work.answered = row
        work.verdict = Verdict(row.sequence_id, row.base_len, tuple(decided), drafted=len(row.tree))
        return work.verdict


class FakeDrafter:
    """Never guesses right. Keeps what it was told as the port demands, and faults when it was told too little."""

    def __init__(self, target: FakeTarget) -> None:
        self.target = target
        self.known: dict[SequenceId, tuple[SequenceStart, list[int]]] = {}
        self.calls: list[tuple[DraftRow, ...]] = []
        """The rows of every call."""

    async def propose(self, rows: Sequence[DraftRow], timeout_seconds: float) -> tuple[Proposal, ...]:
        """See `Drafter`."""
        self.calls.append(tuple(rows))
        await self.think()
        return tuple(self.answer(row) for row in rows)

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `Drafter`."""
        await asyncio.sleep(0)
        for sequence_id in sequence_ids:
            self.known.pop(sequence_id, None)

    async def think(self) -> None:
        """Before the answer: where a drafter is late or fails."""
        await asyncio.sleep(0)

    def answer(self, row: DraftRow) -> Proposal:
        """Learn what is new, then guess."""
        if row.start is not None and row.known_len == 0:
            self.known[row.sequence_id] = (row.start, [])
        if row.sequence_id not in self.known or len(self.known[row.sequence_id][1]) < row.known_len:
            fault = RowFault(RowFaultCode.OUT_OF_SYNC, "told too little")
            return Proposal(row.sequence_id, row.base_len, fault=fault)
        start, tokens = self.known[row.sequence_id]
        tokens[row.known_len :] = row.new_tokens
        return Proposal(row.sequence_id, row.base_len, self.guess(start.sampling, tokens, row))

    def guess(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A tree below `tokens`."""
        length = min(row.budget.max_nodes, row.budget.max_depth)
        wrong = (self.target.next_token(tokens, sampling) + 1) % self.target.vocabulary_size
        return TokenTree.chain([wrong] * length)


class NeverAgree(FakeDrafter):
    """Its first token is wrong, always."""


class AlwaysAgree(FakeDrafter):
    """Knows the model by heart."""

    def guess(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """A chain of what the target will say."""
        chain = list(tokens)
        for _ in range(min(row.budget.max_nodes, row.budget.max_depth)):
            chain.append(self.target.next_token(chain, sampling))
        return TokenTree.chain(chain[len(tokens) :])


class RandomGuesses(FakeDrafter):
    """Random trees, in which the right token is often among the children."""

    def __init__(self, target: FakeTarget, seed: int = 0) -> None:
        super().__init__(target)
        self.random = random.Random(seed)

    def guess(self, sampling: SamplingParameters, tokens: list[int], row: DraftRow) -> TokenTree:
        """Candidates that follow the target for a while and then stray."""
        candidates: list[list[int]] = []
        for _ in range(self.random.randrange(4)):
            path = list(tokens)
            for _ in range(self.random.randrange(row.budget.max_depth + 1)):
                right = self.target.next_token(path, sampling)
                path.append(right if self.random.random() < 0.7 else self.random.randrange(self.target.vocabulary_size))
            candidates.append(path[len(tokens) :])
        return TokenTree.from_candidates(candidates, row.budget.max_nodes)


class Slow(AlwaysAgree):
    """Right, and too late."""

    def __init__(self, target: FakeTarget, delay: float) -> None:
        super().__init__(target)
        self.delay = delay

    async def think(self) -> None:
        """Take its time."""
        await asyncio.sleep(self.delay)


class Failing(AlwaysAgree):
    """Gone while `is_down`, then empty-headed again."""

    is_down = True

    async def think(self) -> None:
        """Refuse while down."""
        await asyncio.sleep(0)
        if self.is_down:
            self.known.clear()
            raise DrafterUnavailable("connection refused")


class Broken(AlwaysAgree):
    """Raises what no port allows."""

    async def think(self) -> None:
        """A bug."""
        raise ZeroDivisionError("a bug in the drafter")


class OutOfSync(AlwaysAgree):
    """Forgets sequences now and then."""

    def __init__(self, target: FakeTarget, seed: int = 0) -> None:
        super().__init__(target)
        self.random = random.Random(seed)

    async def think(self) -> None:
        """Lose some."""
        await asyncio.sleep(0)
        for sequence_id in list(self.known):
            if self.random.random() < 0.3:
                del self.known[sequence_id]


class Liar(RandomGuesses):
    """Breaks the contract: stale stamps, trees beyond the budget, tokens beyond the vocabulary, answers for others."""

    def answer(self, row: DraftRow) -> Proposal:
        """One lie in turn."""
        honest = super().answer(row)
        match self.random.randrange(5):
            case 0:
                return Proposal(row.sequence_id, row.base_len - 1, TokenTree.chain([1, 2]))
            case 1:
                return Proposal(row.sequence_id, row.base_len, TokenTree.chain(range(20)))
            case 2:
                return Proposal(row.sequence_id, row.base_len, TokenTree.chain([self.target.vocabulary_size]))
            case 3:
                return Proposal(SequenceId("nobody"), row.base_len, EMPTY_TREE)
        return honest
