"""A fake target: a tiny deterministic language model behind the target's port.

The next token is a pure hash of all tokens before it and the seed, so a wrong, missing or repeated token changes all
tokens after it. A stream that equals `FakeTarget.answer()` is therefore correct.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from cluster.core.drafting import RowFault, RowFaultCode
from cluster.core.errors import KvPoolExhausted, TargetUnavailable
from cluster.core.ids import SequenceId
from cluster.core.kv import KvLayout, KvOccupancy
from cluster.core.request import GenerationRequest, SamplingParameters, SequenceStart, TokenLogprobs
from cluster.core.tree import ROOT
from cluster.core.verification import OpenResult, OpenRow, StepBatch, StepResult, TargetInfo, Verdict, VerifyRow
from deploy.simulation.block_memory import BlockMemory, BlockTable


@dataclass(slots=True)
class _Stored:
    start: SequenceStart
    tokens: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    answered: VerifyRow | None = None
    verdict: Verdict | None = None


class FakeTarget:
    """A fake of the `Target` port. It checks every row against its stored tokens, and its block pool can run out."""

    def __init__(
        self,
        *,
        vocabulary_size: int = 32,
        block_size: int = 4,
        blocks: int = 256,
        max_context_len: int = 512,
        step_delay: float = 0.0,
        prefix_cache: bool = False,
    ) -> None:
        self.vocabulary_size = vocabulary_size
        self.max_context_len = max_context_len
        self.step_delay = step_delay
        self.stored: dict[SequenceId, _Stored] = {}
        self.new_memory = partial(BlockMemory, blocks, block_size, prefix_cache=prefix_cache)
        """Makes the memory of the next start."""
        self.memory = self.new_memory()
        self._caches = prefix_cache
        self.openings: list[tuple[OpenRow, int]] = []
        """Every opened row, and how many of its tokens were found."""
        self.batches: list[StepBatch] = []
        """Every computed batch."""
        self.faults: list[RowFault] = []
        """Every fault that a verdict reported."""
        self.drafted = 0
        """Number of drafted tokens verified."""
        self.accepted = 0
        """Number of drafted tokens accepted."""
        self.is_down = False
        self.fail_after_computing = 0
        """Number of steps and openings that are computed and then fail before they answer."""
        self._epoch = 0
        self._unhung = asyncio.Event()
        self._unhung.set()

    # --- the model ---

    def next_token(self, tokens: Sequence[int], sampling: SamplingParameters) -> int:
        """The decision after `tokens`; it depends on the seed unless the temperature is 0."""
        seed = sampling.seed if sampling.temperature > 0 else 0
        return zlib.crc32(array("I", tokens).tobytes(), seed & 0xFFFFFFFF) % self.vocabulary_size

    def answer(self, request: GenerationRequest) -> list[int]:
        """The answer of plain decoding, one token at a time."""
        tokens = list(request.prompt)
        while len(tokens) - len(request.prompt) < request.stopping.max_tokens:
            tokens.append(self.next_token(tokens, request.sampling))
            if tokens[-1] in request.stopping.stop_token_ids:
                break
        return tokens[len(request.prompt) :]

    def answers(self, request: GenerationRequest) -> list[list[int]]:
        """The answers of plain decoding for each of the request's seeds."""
        seeds = ((request.sampling.seed + index) % 2**64 for index in range(request.n))
        return [self.answer(replace(request, sampling=replace(request.sampling, seed=seed))) for seed in seeds]

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens after `tokens`, before warping. The greedy decision is the most probable."""
        seen = zlib.crc32(array("I", tokens).tobytes())
        logits = [
            zlib.crc32(token.to_bytes(2 if token > 255 else 1), seen) / 2**29 for token in range(self.vocabulary_size)
        ]
        logits[seen % self.vocabulary_size] = 8.5
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    # --- failures ---

    def crash(self) -> None:
        """Drop all state and refuse all calls until `revive()`."""
        self.is_down = True
        self._forget()

    def revive(self) -> None:
        """Accept calls again, without sequences and with a new epoch."""
        self.drafted = 0
        self.accepted = 0
        self.is_down = False
        self._forget()
        self._epoch += 1

    def hang(self) -> None:
        """Do not answer any call until `unhang()`."""
        self._unhung.clear()

    def unhang(self) -> None:
        """Answer again."""
        self._unhung.set()

    # --- the port ---

    @property
    def blocks(self) -> int:
        """Blocks of the pool."""
        return self.memory.total

    @property
    def blocks_free(self) -> int:
        """Blocks that no sequence holds."""
        return self.memory.free

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is stored and no block is held."""
        return not self.stored and self.blocks_free == self.blocks

    async def step(self, batch: StepBatch) -> StepResult:
        await self._answering()
        await asyncio.sleep(self.step_delay)
        self._check_alive()
        self.batches.append(batch)
        verdicts = tuple(self._verify(batch))
        self._fail_after_computing()
        return StepResult(verdicts, KvOccupancy(self.blocks, self.blocks_free))

    async def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        await self._answering()
        for sequence_id in sequence_ids:
            self._drop(sequence_id)

    async def release_all(self) -> None:
        await self._answering()
        for sequence_id in list(self.stored):
            self._drop(sequence_id)

    async def open(self, rows: Sequence[OpenRow]) -> OpenResult:
        """Open a sequence. Shares the parent's blocks and, with a prefix cache, full blocks of earlier sequences."""
        await self._answering()
        lens = tuple(self._open(row) for row in rows)
        self.openings += zip(rows, lens, strict=True)
        self._fail_after_computing()
        return OpenResult(lens, KvOccupancy(self.blocks, self.blocks_free))

    async def info(self) -> TargetInfo:
        await self._answering()
        return TargetInfo(
            model="fake",
            vocabulary_size=self.vocabulary_size,
            max_context_len=self.max_context_len,
            layout=KvLayout(self.memory.block_size),
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

    def _fail_after_computing(self) -> None:
        if self.fail_after_computing:
            self.fail_after_computing -= 1
            raise TargetUnavailable("the answer was lost")

    def _forget(self) -> None:
        self.stored.clear()
        self.memory = self.new_memory()

    def _drop(self, sequence_id: SequenceId) -> None:
        if (stored := self.stored.pop(sequence_id, None)) is not None:
            self.memory.release(stored.table)

    def _open(self, row: OpenRow) -> int:
        parent = self.stored.get(row.parent) if row.parent is not None else None
        alike = 0
        if parent is not None and parent.start.cache_salt == row.start.cache_salt:
            most = min(len(parent.tokens), len(row.tokens) - 1)
            alike = next((i for i in range(most) if parent.tokens[i] != row.tokens[i]), most)
        table = BlockTable() if parent is None else self.memory.share(parent.table, alike)
        found = self.memory.find(row.start.cache_salt, self._full_blocks(row.tokens[:-1]))
        known = len(found.blocks) * self.memory.block_size
        kept, left = (found, table) if known > alike else (table, found)
        self.memory.release(left)
        self._drop(row.sequence_id)
        self.stored[row.sequence_id] = _Stored(row.start, list(row.tokens[: max(known, alike)]), kept)
        return max(known, alike)

    def _full_blocks(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """The end of each full block, and what stands for all tokens before it; empty without a prefix cache."""
        size = self.memory.block_size
        if not self._caches:
            return []
        return [(end, hash(tuple(tokens[:end]))) for end in range(size, len(tokens) + 1, size)]

    def _verify(self, batch: StepBatch) -> list[Verdict]:
        """Reserve the blocks of all rows, as in one forward pass; then decide each row."""
        prepared = [(row, self._prepare(row)) for row in batch.rows]
        return [self._decide(row, state) for row, state in prepared]

    def _prepare(self, row: VerifyRow) -> _Stored | RowFault | Verdict:
        stored = self.stored.get(row.sequence_id)
        if not row.pending or (row.tree.tokens and not row.decide):
            return RowFault(RowFaultCode.INVALID, "a row must have pending tokens, and a tree requires a decision")
        if max((*row.pending, *row.tree.tokens)) >= self.vocabulary_size:
            return RowFault(RowFaultCode.INVALID, "a token is outside the vocabulary")
        if row.base_len + row.tree.depth() > self.max_context_len:
            return RowFault(RowFaultCode.INVALID, "the row exceeds the context")
        if stored is not None and stored.verdict is not None and row == stored.answered:
            return stored.verdict
        if row.start is not None and row.start_len == 0:
            self._drop(row.sequence_id)
            stored = self.stored[row.sequence_id] = _Stored(row.start)
        if stored is None or row.start_len != len(stored.tokens):
            held = 0 if stored is None else len(stored.tokens)
            return RowFault(
                RowFaultCode.OUT_OF_SYNC, f"{held} tokens are stored, found start_len {row.start_len}", held
            )
        try:
            self.memory.reserve(stored.table, len(stored.tokens), row.base_len + len(row.tree))
        except KvPoolExhausted:
            return RowFault(RowFaultCode.KV_EXHAUSTED, "no free block", len(stored.tokens))
        return stored

    def _decide(self, row: VerifyRow, state: _Stored | RowFault | Verdict) -> Verdict:
        if isinstance(state, Verdict):
            return state
        if isinstance(state, RowFault):
            self.faults.append(state)
            return Verdict(row.sequence_id, row.base_len, fault=state)
        state.tokens.extend(row.pending)
        decided: list[int] = []
        node: int | None = ROOT
        while row.decide and node is not None:
            token = self.next_token([*state.tokens, *decided], state.start.sampling)
            decided.append(token)
            node = row.tree.child(node, token)
        state.tokens.extend(decided[:-1])
        self.drafted += len(row.tree)
        self.accepted += max(0, len(decided) - 1)
        self.memory.truncate(state.table, len(state.tokens))
        self.memory.store(state.start.cache_salt, state.table, self._full_blocks(state.tokens))
        state.answered = row
        logprobs = self._top_logprobs(state, row.base_len, decided)
        state.verdict = Verdict(row.sequence_id, row.base_len, tuple(decided), len(row.tree), logprobs)
        return state.verdict

    def _top_logprobs(self, state: _Stored, base_len: int, decided: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        if state.start.sampling.logprobs is None:
            return ()
        reported: list[TokenLogprobs] = []
        tokens = state.tokens[:base_len]
        for token in decided:
            values = self.logprobs(tokens)
            ranked = sorted(range(len(values)), key=lambda other: -values[other])[: state.start.sampling.logprobs]
            reported.append(TokenLogprobs(token, values[token], tuple((other, values[other]) for other in ranked)))
            tokens.append(token)
        return tuple(reported)
