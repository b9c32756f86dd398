"""A simulated target and coordinator: they verify proposals, send rows and evidence, and check every proposal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, Evidence, EvidenceNeeds, HiddenStates, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT, TokenTree
from tests.unit.draft.contract.methods import HIDDEN, VOCABULARY

SAMPLINGS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8, top_p=0.9, seed=11),
    SamplingParameters(temperature=1.0, presence_penalty=0.5, end_token_ids=(2,), min_tokens=6, seed=2**64 - 1),
)
SMALL_VOCABULARY = 6
"""Tokens are drawn from this many ids, so that texts repeat themselves."""


def check_proposal(row: DraftRow, proposal: Proposal) -> None:
    """Check everything that a proposal without a fault promises."""
    tree = proposal.tree
    assert (proposal.sequence_id, proposal.base_len, proposal.fault) == (row.sequence_id, row.base_len, None)
    assert len(tree) <= row.budget.max_nodes and tree.depth() <= row.budget.max_depth
    assert all(0 <= token < VOCABULARY for token in tree.tokens)
    assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree)  # siblings are distinct
    assert 0 <= proposal.ready <= len(tree)
    assert len(proposal.probabilities) in (0, len(tree))
    for node, parent in enumerate(tree.parents if proposal.probabilities else ()):
        above = 1.0 if parent == ROOT else proposal.probabilities[parent]
        assert 0.0 <= proposal.probabilities[node] <= above
    assert len(proposal.distributions) in (0, len(tree))
    assert len(proposal.origins) in (0, len(tree))
    assert DraftOrigin.FORCED not in proposal.origins  # only the coordinator knows what a grammar forces


@dataclass
class SimulatedSequence:
    """One sequence of a simulated target, and what its drafter was sent."""

    name: str
    draw: random.Random
    needs: EvidenceNeeds
    sampling: SamplingParameters
    tokens: list[int] = field(default_factory=list)
    sent_len: int = 0
    evidence: list[Evidence] = field(default_factory=list)
    decoder_start: tuple[int, ...] = ()
    """The prompt of an encoder-decoder target, which reads a source."""
    has_usual_states: bool = True
    """Whether all values of hidden states are within ±2, not any finite numbers."""

    def __post_init__(self) -> None:
        prompt = self._some(self.draw.randrange(2, 30))
        self.tokens = [*self.decoder_start] or prompt
        source = tuple(prompt) if self.decoder_start else ()
        self.start = SequenceStart(len(self.tokens), self.sampling, prediction=tuple(self._some(20)), source=source)

    def row(self, budget: DraftBudget) -> DraftRow:
        """The next row. Evidence is sometimes missing, as after a cached prefix or a restart."""
        start = self.start if self.sent_len == 0 else None
        evidence = tuple(one for one in self.evidence if self.draw.random() < 0.8) if self.needs.any else ()
        self.evidence.clear()
        new = tuple(self.tokens[self.sent_len :])
        return DraftRow(SequenceId(self.name), len(self.tokens), new, budget, start, evidence)

    def verify(self, tree: TokenTree) -> None:
        """Accept a random path of the tree and commit it with one more token."""
        decisions = self._some(len(tree) + 1)
        nodes: list[int] = []
        node = ROOT
        while True:
            children = [child for child, parent in enumerate(tree.parents) if parent == node]
            if not children or self.draw.random() < 0.3:
                break
            node = self.draw.choice(children)
            decisions[(nodes[-1] if nodes else ROOT) + 1] = tree.tokens[node]
            nodes.append(node)
        base_len = len(self.tokens)
        self.tokens += [*(tree.tokens[node] for node in nodes), decisions[node + 1]]
        self.evidence.append(self._evidence(base_len, tree, decisions, nodes))

    def replace_end(self) -> None:
        """Replace the last tokens, as another round of the same length would."""
        removed = self.draw.randrange(1, len(self.tokens) - self.start.prompt_len + 2)
        length = max(self.start.prompt_len, len(self.tokens) - removed)
        self.tokens[length:] = self._some(self.draw.randrange(1, 4))
        self.sent_len = min(self.sent_len, length)
        self.evidence.clear()

    def _evidence(self, base_len: int, tree: TokenTree, decisions: Sequence[int], nodes: Sequence[int]) -> Evidence:
        needs, count = self.needs, len(nodes) + 1
        width = HIDDEN * len(needs.taps)
        data = bytearray(self.draw.randbytes(2 * width * count).replace(b"\x7f", b"\x3f").replace(b"\xff", b"\xbf"))
        if self.has_usual_states:  # most others overflow within a module
            data[1::2] = self.draw.choices(b"\x3d\x3e\x3f\xbd\xbe\xbf", k=width * count)
        return Evidence(
            base_len,
            tree,
            tuple(decisions) if needs.decisions else (),
            tuple(tuple(self.draw.sample(range(VOCABULARY), needs.top)) for _ in range(count)) if needs.top else (),
            HiddenStates(base_len - 1, width, bytes(data)) if needs.taps else None,
        )

    def _some(self, count: int) -> list[int]:
        return [3 + self.draw.randrange(SMALL_VOCABULARY) for _ in range(count)]


def restarted(row: DraftRow, sequence: SimulatedSequence) -> DraftRow:
    """The row of the same length with the whole sequence."""
    return replace(row, new_tokens=tuple(sequence.tokens), start=sequence.start, evidence=())
