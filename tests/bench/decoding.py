"""Steps a target's engine directly, without gRPC and without a coordinator."""

from __future__ import annotations

import gc
import random
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from cluster.core.config.target_section import TargetSection
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from tests.bench.report import Stopwatch
from workers.kv.start_memory import POPULATING
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

GREEDY = SamplingParameters(temperature=0.0)


class Decoding:
    """The sequences of one engine, which all take part in every step."""

    def __init__(self, engine: TargetEngine, chunk: int) -> None:
        self.engine = engine
        self._chunk = chunk
        self._vocabulary = engine.info().vocabulary_size
        self._tokens: dict[SequenceId, list[int]] = {}
        self._draw = random.Random(0)

    def add(self, name: str, prompt: Sequence[int]) -> float:
        """Prefill `prompt` in the chunks that the cluster would send, and decide the next token. Returns seconds."""
        sequence_id, tokens = SequenceId(name), tuple(prompt)
        start = SequenceStart(len(tokens), GREEDY)
        seconds = 0.0
        for first in range(0, len(tokens), self._chunk):
            end = min(first + self._chunk, len(tokens))
            row = VerifyRow(
                sequence_id,
                end,
                tokens[first:end],
                decide=end == len(tokens),
                start=start if first == 0 else None,
            )
            verdicts, spent = self._step([row])
            seconds += spent
        self._tokens[sequence_id] = [*tokens, *verdicts[0].tokens]
        return seconds

    def add_all(self, prompts: Mapping[str, Sequence[int]]) -> float:
        """Prefill short prompts, as many in one step as a chunk has tokens, and decide the next tokens.

        Returns seconds.
        """
        rows: list[VerifyRow] = []
        seconds = 0.0
        for name, prompt in prompts.items():
            tokens = tuple(prompt)
            if sum(len(row.pending) for row in rows) + len(tokens) > self._chunk:
                seconds += self._begin(rows)
                rows = []
            rows.append(VerifyRow(SequenceId(name), len(tokens), tokens, start=SequenceStart(len(tokens), GREEDY)))
        return seconds + self._begin(rows)

    def _begin(self, rows: list[VerifyRow]) -> float:
        verdicts, seconds = self._step(rows)
        for row, verdict in zip(rows, verdicts, strict=True):
            self._tokens[row.sequence_id] = [*row.pending, *verdict.tokens]
        return seconds

    def step(self, queries: int = 1) -> float:
        """Verify a chain of `queries - 1` drafted tokens for each sequence in one step. Returns seconds."""
        rows = [
            VerifyRow(sequence_id, len(tokens), (tokens[-1],), self._chain(queries - 1))
            for sequence_id, tokens in self._tokens.items()
        ]
        verdicts, seconds = self._step(rows)
        for verdict in verdicts:
            self._tokens[verdict.sequence_id].extend(verdict.tokens)
        return seconds

    def median_step(self, prompts: Sequence[Sequence[int]], tokens: int, *, warm: int, timed: int) -> float:
        """Median seconds of `timed` steps with `tokens` tokens of each prompt's sequence, after `warm` other ones."""
        for index, prompt in enumerate(prompts):
            self.add(f"s{index}", prompt)
        for _ in range(warm):
            self.step(tokens)
        seconds = statistics.median(self.step(tokens) for _ in range(timed))
        self.clear()
        return seconds

    def verify(self, name: str, drafted: Sequence[int]) -> None:
        """Verify a chain of drafted tokens for one sequence, in a step of its own."""
        tokens = self._tokens[SequenceId(name)]
        tree = TokenTree.chain(drafted) if drafted else EMPTY_TREE
        verdicts, _ = self._step([VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), tree)])
        tokens.extend(verdicts[0].tokens)

    def text(self, name: str) -> tuple[int, ...]:
        """The tokens of a sequence, prompt included."""
        return tuple(self._tokens[SequenceId(name)])

    def clear(self) -> None:
        """Release every sequence."""
        self._tokens.clear()
        self.engine.release_all()

    def _chain(self, length: int) -> TokenTree:
        """Random tokens, which are nearly always rejected but cost the same."""
        if length == 0:
            return EMPTY_TREE
        return TokenTree.chain(self._draw.randrange(self._vocabulary) for _ in range(length))

    def _step(self, rows: list[VerifyRow]) -> tuple[tuple[Verdict, ...], float]:
        with Stopwatch() as watch:
            result = self.engine.step(StepBatch(tuple(rows)))
        for verdict in result.verdicts:
            if verdict.fault is not None:
                raise RuntimeError(f"{verdict.sequence_id}: {verdict.fault}")
        return result.verdicts, watch.seconds


def alike(prompt: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Prompts that differ in their last token."""
    return [(*prompt[:-1], prompt[-1] + index) for index in range(count)]


@contextmanager
def decoding(section: TargetSection, chunk: int) -> Iterator[Decoding]:
    """An engine as the configuration builds it, with the threads of this process."""
    engine = build_engine(section)
    for thread in threading.enumerate():
        if thread.name == POPULATING:
            thread.join()  # it would take the memory's time from the first steps
    try:
        yield Decoding(engine, chunk)
    finally:
        engine.close()
        del engine
        gc.collect()
