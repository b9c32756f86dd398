"""Predicts τ and the speed-up of speculative decoding from the agreement of two models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A draft tree with the same number of children below every node."""

    width: int
    """Children of a node; 1 is a chain."""
    depth: int

    @property
    def nodes(self) -> int:
        """Number of drafted tokens."""
        return sum(self.width**level for level in range(1, self.depth + 1))

    def __str__(self) -> str:
        """For tables."""
        return f"chain of {self.depth}" if self.width == 1 else f"{self.width} children, {self.depth} deep"


def tau_on_texts(ranks: Sequence[Sequence[int]], tree: TreeShape) -> float:
    """τ of greedy decoding when the texts are the target's own: its rounds are repeated position by position.

    A drafted token is accepted where the target's token has a rank below the width of the tree.
    """
    rounds = sum(_rounds(row, tree) for row in ranks)
    return sum(map(len, ranks)) / rounds if rounds else 0.0


def tau_with_prompts(ranks: Sequence[Sequence[int]], tree: TreeShape) -> float:
    """Committed tokens per target step, if the step that reads the prompt decides each text's first token undrafted."""
    rounds = sum(1 + _rounds(row[1:], tree) for row in ranks)
    return sum(map(len, ranks)) / rounds if rounds else 0.0


def _rounds(row: Sequence[int], tree: TreeShape) -> int:
    position = rounds = 0
    while position < len(row):
        accepted = 0
        while accepted < tree.depth and position + accepted < len(row) and row[position + accepted] < tree.width:
            accepted += 1
        position += accepted + 1
        rounds += 1
    return rounds


def tau_of_rate(rate: float, depth: int) -> float:
    """τ of a chain whose tokens are accepted independently: (1 − α^(γ+1)) ÷ (1 − α) (Leviathan et al. 2023)."""
    return sum(rate**length for length in range(depth + 1))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Mean times of rounds after the prompt, in seconds."""

    plain: float
    """A round of plain decoding: a step of the target and the rest."""
    drafted: float
    """A round with a draft tree."""
    waiting: float
    """The part of a round with a draft tree in which the coordinator waits for drafts."""

    def speedup(self, tau: float) -> float:
        """The predicted speed ÷ that of plain decoding, without prompts."""
        return tau * self.plain / self.drafted if self.drafted else 0.0
