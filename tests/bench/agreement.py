"""How often a drafter's first token is the target's next token, at every position of the target's own text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.drafting import DraftBudget, DraftRow
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.wire.connection import fixed_address
from cluster.wire.drafter_client import GrpcDrafter

ONE = DraftBudget(max_nodes=1, max_depth=1)
TIMEOUT_SECONDS = 60.0
AT_ONCE = 8
"""Number of texts compared at the same time."""


@dataclass(frozen=True)
class Agreement:
    """The number of positions where the first drafted token was right, and of all positions."""

    right: int = 0
    positions: int = 0

    @property
    def share(self) -> float:
        """Share of the positions where the drafted token was right, 0 to 1."""
        return self.right / self.positions if self.positions else 0.0

    def __add__(self, other: Agreement) -> Agreement:
        return Agreement(self.right + other.right, self.positions + other.positions)


async def agreement(address: str, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Agreement:
    """Request one greedy token at each position from the drafter at `address`."""
    drafter = GrpcDrafter(fixed_address(address))
    found = Agreement()
    try:
        for first in range(0, len(prompts), AT_ONCE):
            part = slice(first, first + AT_ONCE)
            found += await _side_by_side(drafter, prompts[part], texts[part])
    finally:
        await drafter.close()
    return found


async def _side_by_side(
    drafter: GrpcDrafter, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> Agreement:
    names = [SequenceId(f"agreement-{index}") for index in range(len(prompts))]
    right = positions = 0
    for step in range(max(map(len, texts), default=0)):
        rows = [
            _row(name, prompt, text, step)
            for name, prompt, text in zip(names, prompts, texts, strict=True)
            if step < len(text)
        ]
        running = [text for text in texts if step < len(text)]
        for text, proposal in zip(running, await drafter.propose(rows, TIMEOUT_SECONDS), strict=True):
            positions += 1
            right += proposal.tree.tokens[:1] == (text[step],)
    await drafter.release(names)
    return Agreement(right, positions)


def _row(name: SequenceId, prompt: Sequence[int], text: Sequence[int], step: int) -> DraftRow:
    """The row that requests a draft of `text[step]`. It commits the token before."""
    if step == 0:
        start = SequenceStart(len(prompt), SamplingParameters(temperature=0.0))
        return DraftRow(name, len(prompt), tuple(prompt), ONE, start)
    return DraftRow(name, len(prompt) + step, (text[step - 1],), ONE)
