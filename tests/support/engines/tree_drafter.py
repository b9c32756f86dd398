"""A tree drafter over the fake expander, and the sequences that it drafts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.support.fakes.fake_expander import CONFIDENCES, FakeExpander
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter

PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParameters(temperature=0.0)
BUDGET = DraftBudget(8, 4)

Mode = Literal["serial", "run_ahead", "enumerate"]


class LookupSettings(ExpansionSettings):
    """Settings of trees with looked-up tokens."""

    @property
    def has_lookup(self) -> bool:
        return True


class DrafterHarness:
    """A drafter over the fake expander, and the tokens of the sequences that it drafts for."""

    def __init__(
        self,
        mode: Mode = "serial",
        blocks: int = 100,
        confidences: Sequence[float] = CONFIDENCES,
        lookup: Literal["off", "on"] = "off",
        vocabulary_size: int | None = None,
        **changes: int,
    ) -> None:
        self.expander = FakeExpander(blocks, confidences, vocabulary_size)
        self.now = 0.0
        settings = (LookupSettings if lookup == "on" else ExpansionSettings)(mode=mode, **changes)
        draft = DraftSection(max_nodes=16, max_depth=8)
        self.drafter = TreeDrafter(self.expander, settings, draft, clock=lambda: self.now)
        self.tokens: dict[str, list[int]] = {}
        self.sampling = GREEDY

    def propose(self, name: str = "a", *committed: int, budget: DraftBudget = BUDGET) -> Proposal:
        return self.propose_all([name], {name: committed}, budget)[0]

    def propose_all(
        self, names: Sequence[str], committed: dict[str, Sequence[int]] | None = None, budget: DraftBudget = BUDGET
    ) -> tuple[Proposal, ...]:
        rows = []
        for name in names:
            new = tuple((committed or {}).get(name, ()))
            start = None
            if name not in self.tokens:
                self.tokens[name] = []
                new = new or PROMPT
                start = SequenceStart(len(new), self.sampling)
            self.tokens[name] += new
            rows.append(DraftRow(SequenceId(name), len(self.tokens[name]), new, budget, start))
        self.expander.passes.clear()
        return self.drafter.propose(rows)

    def run_ahead(self, most: int = 100) -> int:
        self.expander.passes.clear()
        return sum(self.drafter.run_ahead() for _ in range(most))

    def release_all(self) -> None:
        self.drafter.release([SequenceId(name) for name in self.tokens])

    @property
    def tokens_computed(self) -> int:
        """Number of tokens in all passes of the last call."""
        return sum(sum(row_lengths) for row_lengths in self.expander.passes)
