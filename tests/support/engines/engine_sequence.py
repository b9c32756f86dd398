"""One sequence decoded on a target engine, step by step, with drafts that are often right."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import OpenRow, StepBatch, VerifyRow
from tests.support.models import tiny
from workers.verify.engine import TargetEngine

GREEDY = SamplingParameters(temperature=0.0)
Propose = Callable[[Sequence[int]], TokenTree]
"""Drafts a tree after the tokens of a sequence."""


def some_tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, tiny.VOCABULARY) for _ in range(count)]


def no_draft(_: Sequence[int]) -> TokenTree:
    return EMPTY_TREE


def drafts_near(answer: Sequence[int], seed: int = 0) -> Propose:
    """A drafter of branching trees in which one branch often agrees with the target for some tokens."""
    draw = random.Random(seed)

    def propose(tokens: Sequence[int]) -> TokenTree:
        true = [answer[position] for position in range(len(tokens), min(len(tokens) + 6, len(answer)))]
        right = true[: draw.randrange(7)]
        wrong = [[*right[: draw.randrange(3)], *some_tokens(2, draw.randrange(999))] for _ in range(2)]
        candidates = [right, *wrong]
        draw.shuffle(candidates)
        return TokenTree.from_candidates([candidate for candidate in candidates if candidate], max_nodes=12)

    return propose


class BothTexts:
    """Drafts two texts and noise in one tree, so that its nodes are on paths that are allowed and that are excluded."""

    def __init__(self, allowed: Sequence[int], free: Sequence[int], vocabulary: int = tiny.VOCABULARY) -> None:
        self._texts, self._vocabulary, self._draw = (allowed, free), vocabulary, random.Random(0)
        self.steps = 0

    def __call__(self, tokens: Sequence[int]) -> TokenTree:
        self.steps += 1
        noise = [self._draw.randrange(self._vocabulary) for _ in range(3)]
        candidates = [*(text[len(tokens) :][:4] for text in self._texts), noise]
        return TokenTree.from_candidates([one for one in candidates if one], max_nodes=12)


@dataclass
class EngineSequence:
    """One sequence on an engine."""

    engine: TargetEngine
    tokens: list[int]
    start: SequenceStart
    name: SequenceId
    chunk: int = 1000

    def open(self, parent: str | None = None) -> int:
        """Open the sequence on the engine. Returns the number of tokens that were stored already."""
        row = OpenRow(self.name, tuple(self.tokens), self.start, None if parent is None else SequenceId(parent))
        self.stored = self.engine.open([row]).stored_lens[0]
        return self.stored

    def decode(self, count: int, propose: Propose = no_draft) -> list[int]:
        first = len(self.tokens)
        while len(self.tokens) < first + count:
            self.step(propose)
        del self.tokens[first + count :]  # a longer answer is a prefix of the same text
        return self.tokens[first:]

    def step(self, propose: Propose = no_draft) -> None:
        end = min(self.stored + self.chunk, len(self.tokens))
        decide = end == len(self.tokens)
        tree = propose(self.tokens) if decide else EMPTY_TREE
        row = VerifyRow(self.name, end, tuple(self.tokens[self.stored : end]), tree, decide)
        verdict = self.engine.step(StepBatch((row,))).verdicts[0]
        assert verdict.fault is None, verdict.fault
        self.tokens.extend(verdict.tokens)
        self.stored = end + verdict.accepted


def sequence_on(
    engine: TargetEngine, prompt: Sequence[int], name: str = "a", salt: str = "", sampling: SamplingParameters = GREEDY
) -> EngineSequence:
    return EngineSequence(engine, list(prompt), SequenceStart(len(prompt), sampling, salt), SequenceId(name))


def generate(
    engine: TargetEngine, prompt: Sequence[int], count: int, salt: str = "", propose: Propose = no_draft
) -> list[int]:
    sequence = sequence_on(engine, prompt, salt=salt)
    sequence.open()
    tokens = sequence.decode(count, propose)
    engine.release([sequence.name])
    return tokens
