"""Draft trees stay consistent and no block leaks under any order of commits, repeats, passes and releases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT
from tests.support.engines.tree_drafter import LookupSettings
from tests.support.fakes.fake_expander import BLOCK, FakeExpander, SourcedFakeExpander, ranked
from workers.draft.common.trees.draft_tree import DraftTree
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter

pytestmark = pytest.mark.slow

NAMES = "abc"
SAMPLINGS = (SamplingParameters(temperature=0.0), SamplingParameters(seed=1))
SOURCES = ((1, 2, 3), (4, 5) * 9)
CONTEXT = 40


def followed_earlier(tokens: list[int]) -> list[int]:
    """Tokens that followed the last two tokens earlier in the list."""
    return [tokens[end] for end in range(2, len(tokens)) if tokens[end - 2 : end] == tokens[-2:]]


class TreeDrafterMachine(RuleBasedStateMachine):
    """A coordinator with its own record of the tokens, and a drafter whose KV pool is nearly always full."""

    @initialize(
        mode=st.sampled_from(["serial", "run_ahead", "enumerate"]),
        blocks=st.integers(4, 60),
        width=st.integers(1, 4),
        drafted=st.integers(1, 3),
        chunk=st.integers(4, 64),
        lookup=st.sampled_from(["off", "on"]),
        expander=st.sampled_from([FakeExpander, SourcedFakeExpander]),
    )
    def begin(
        self, mode: Any, blocks: int, width: int, drafted: int, chunk: int, lookup: Any, expander: type[FakeExpander]
    ) -> None:
        self.has_lookup = lookup == "on"
        self.expander = expander(blocks, confidences=(0.6, 0.2, 0.1)[:drafted])
        self.expander.max_context_len = CONTEXT
        kind = LookupSettings if self.has_lookup else ExpansionSettings
        settings, draft = kind(mode=mode, width=width), DraftSection(max_nodes=8, max_depth=6)
        self.drafter = TreeDrafter(self.expander, settings, draft, chunk, clock=lambda: 0.0)
        self.tokens: dict[str, list[int]] = {}
        self.sent_len: dict[str, int] = {}
        self.proposals: dict[str, Proposal] = {}

    def row(self, name: str, nodes: int, depth: int, start: SequenceStart | None = None) -> DraftRow:
        tokens = self.tokens[name]
        new = tokens if start is not None else tokens[min(self.sent_len[name], len(tokens)) :]
        return DraftRow(SequenceId(name), len(tokens), tuple(new), DraftBudget(nodes, depth), start)

    def propose(self, rows: list[DraftRow]) -> None:
        for row, proposal in zip(rows, self.drafter.propose(rows), strict=True):
            name = str(row.sequence_id)
            if proposal.fault is not None:
                assert proposal.fault.code is RowFaultCode.OUT_OF_SYNC
                self.proposals.pop(name, None)
                del self.tokens[name]
                continue
            self.sent_len[name] = row.base_len
            self.proposals[name] = proposal
            self.check_proposal(row, proposal)

    def check_proposal(self, row: DraftRow, proposal: Proposal) -> None:
        tree = proposal.tree
        assert len(tree) <= row.budget.max_nodes and tree.depth() <= row.budget.max_depth
        assert len(proposal.probabilities) == len(tree) >= proposal.ready
        for node, parent in enumerate(tree.parents):
            above = 1.0 if parent == ROOT else proposal.probabilities[parent]
            assert 0.0 <= proposal.probabilities[node] <= above
            before = [*self.tokens[str(row.sequence_id)], *tree.path_tokens(parent)]
            assert tree.tokens[node] in (followed_earlier(before) if self.has_lookup else []) + ranked(before)
            assert len(before) <= CONTEXT or self.has_lookup

    @rule(
        name=st.sampled_from(NAMES),
        prompt=st.lists(st.integers(0, 6), min_size=1, max_size=30),
        sampling=st.sampled_from(SAMPLINGS),
        nodes=st.integers(0, 8),
        source=st.sampled_from(SOURCES),
    )
    def start(
        self, name: str, prompt: list[int], sampling: SamplingParameters, nodes: int, source: tuple[int, ...]
    ) -> None:
        self.tokens[name] = list(prompt)
        read = source if isinstance(self.expander, SourcedFakeExpander) else ()
        self.propose([self.row(name, nodes, 6, SequenceStart(len(prompt), sampling, source=read))])

    @rule(data=st.data(), nodes=st.integers(0, 8), depth=st.integers(0, 6))
    def commit(self, data: st.DataObject, nodes: int, depth: int) -> None:
        """Some sequences commit a proposed path, or a part of one, and a token of the target's own."""
        rows = []
        for name in sorted(self.proposals):
            if not data.draw(st.booleans()):
                continue
            tree = self.proposals[name].tree
            node = data.draw(st.integers(ROOT, len(tree) - 1))
            self.tokens[name] += [*tree.path_tokens(node), data.draw(st.integers(0, 6))]
            rows.append(self.row(name, nodes, depth))
        self.propose(rows)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A row is repeated; it may be an old one."""
        for name in sorted(self.proposals):
            shorter = data.draw(st.integers(0, 3))
            if shorter:
                del self.tokens[name][max(1, len(self.tokens[name]) - shorter) :]
                self.sent_len[name] = max(0, len(self.tokens[name]) - data.draw(st.integers(0, 2)))
            before = self.proposals[name]
            self.propose([self.row(name, 8, 6)])
            if not shorter and name in self.proposals and len(before.tree) == 8:
                assert len(self.proposals[name].tree) == 8

    @rule(passes=st.integers(1, 5))
    def run_ahead(self, passes: int) -> None:
        for _ in range(passes):
            self.drafter.run_ahead()

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        self.drafter.release([SequenceId(name)])
        self.proposals.pop(name, None)
        self.tokens.pop(name, None)

    @rule()
    def fail(self) -> None:
        """A pass that fails leaves everything as it was."""
        self.expander.failing = True
        try:
            self.drafter.run_ahead()
        except RuntimeError:
            pass
        finally:
            self.expander.failing = False

    @invariant()
    def every_tree_is_consistent_and_its_kv_is_stored(self) -> None:
        if not hasattr(self, "drafter"):
            return
        sessions = self.drafter._sessions._sessions
        tables = set()
        for name, session in sessions.items():
            self.check_tree(session.tree, self.tokens.get(str(name), session.tokens))
            tables |= session.tree.tables()
        held = {block for table in tables for block in table.blocks[0]}
        of_sources = getattr(self.expander, "source_blocks", 0)
        assert self.expander.memory.blocks_held == len(held) + of_sources  # no block leaks
        for table in tables:
            assert len(table.blocks[0]) == -(-table.stored_len // BLOCK)  # every held block is used
            assert self.expander.memory.read(table) == table.tokens

    def check_tree(self, tree: DraftTree, tokens: list[int]) -> None:
        assert tree.root.length == len(tokens) and tree.root.path_probability == 1.0
        assert tree.root_table.tokens[: len(tokens)] == tokens[: tree.root_table.stored_len]
        assert (tree.root.table is None) == (tree.root_table.stored_len < len(tokens))
        paths = {id(tree.root): tokens}
        for node in tree.nodes:
            parent = node.parent
            assert parent is not None and node in parent.children
            assert parent.table is not None or (node.match_length and node.table is None)
            assert 0.0 <= node.path_probability <= parent.path_probability + 1e-9
            path = paths[id(node)] = [*paths[id(parent)], node.token]
            assert node.length == len(path)
            if node.table is not None:
                assert node.table.tokens[: len(path)] == path
        assert sum(len(node.children) for node in (tree.root, *tree.nodes)) == len(tree.nodes)

    def teardown(self) -> None:
        if hasattr(self, "drafter"):
            self.drafter.release([SequenceId(name) for name in NAMES])
            assert self.expander.memory.blocks_held == 0


TestTreeDrafter = TreeDrafterMachine.TestCase
TestTreeDrafter.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
