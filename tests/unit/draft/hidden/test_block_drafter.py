"""The block drafter, row by row: its passes equal the module's, and its context survives cuts, gaps and repetitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from cluster.core.config.sections import DraftSection, TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Evidence, HiddenStates, Proposal, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from tests.unit.draft.hidden.conftest import VOCABULARY
from workers.draft.hidden.block_drafter import BlockTreeDrafter, load_block_drafter
from workers.draft.hidden.block_pass import BlockPass
from workers.draft.hidden.context_window import ContextWindow
from workers.draft.hidden.settings import ContextModuleSettings
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.files import load_drafter

SIZE, TAPS, WINDOW = 48, (1, 2), 16
BUDGET = DraftBudget(8, 4)
GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, seed=7)
generator = torch.Generator().manual_seed(3)
STATES = torch.randn(200, len(TAPS) * SIZE, generator=generator).bfloat16()
"""Hidden states of one text of 200 tokens."""
TOKENS = [int(token) for token in torch.randint(0, 96, (200,), generator=generator)]

Make = Callable[..., BlockTreeDrafter]


@pytest.fixture
def make(target: Path, block_directory: Path) -> Make:
    def create(**settings: object) -> BlockTreeDrafter:
        values = {"path": str(block_directory), "weights": "float32"} | settings
        section = TargetSection.model_validate({"path": str(target), "device": "cpu", "evidence": {"taps": TAPS}})
        return load_block_drafter(ContextModuleSettings.model_validate(values), DraftSection(), section, siblings=3)

    return create


def shown(first: int, end: int) -> Evidence:
    """The hidden states of positions of the text."""
    data = STATES[first:end].contiguous().view(torch.uint8).numpy().tobytes()
    return Evidence(end, hidden=HiddenStates(first, len(TAPS) * SIZE, data))


def row(
    length: int,
    known: int = 0,
    evidence: Sequence[Evidence] = (),
    *,
    name: str = "a",
    sampling: SamplingParameters = GREEDY,
    budget: DraftBudget = BUDGET,
    salt: str = "",
) -> DraftRow:
    """A row for the first `length` tokens of the text, of which the drafter holds `known`."""
    start = SequenceStart(4, sampling, salt) if known == 0 else None
    return DraftRow(SequenceId(name), length, tuple(TOKENS[known:length]), budget, start, tuple(evidence))


def draft(drafter: BlockTreeDrafter, *rows: DraftRow) -> Proposal:
    """The proposal for the last row, each row being sent in a call of its own."""
    return [drafter.propose([one])[0] for one in rows][-1]


@pytest.mark.parametrize("known", [(0, 29), (20, 29), (3, 4, 28, 29)], ids=["all", "late", "gaps"])
def test_its_passes_equal_the_modules(target: Path, block_directory: Path, known: tuple[int, ...]) -> None:
    """Positions come piece by piece, and two rows are drafted for at once."""
    loaded = load_drafter(block_directory, target, torch.float32, torch.device("cpu"))
    module = loaded.module
    assert isinstance(module, BlockDrafter)
    block = BlockPass(module, loaded.ends, "float32")
    windows = [ContextWindow(block.context_shape, block.device) for _ in range(2)]
    anchors = [29, 17]
    for window, anchor in zip(windows, anchors, strict=True):
        pieces = [(0, 9), (9, anchor)] if window is windows[1] else zip(known[::2], known[1::2], strict=True)
        for first, end in pieces:
            taps = STATES[first:end].view(end - first, len(TAPS), SIZE)
            window.store(first, block.context(taps, torch.arange(first, end)))
    found = block.draft([5, 6], anchors, windows)

    for index, anchor in enumerate(anchors):
        fused, keys, values = module.context(STATES[:anchor].float().unsqueeze(0), torch.arange(anchor).unsqueeze(0))
        context = torch.arange(anchor).unsqueeze(0)
        if index == 0:
            is_known = torch.tensor(
                [any(a <= p < b for a, b in zip(known[::2], known[1::2], strict=True)) for p in context[0]]
            )
            context = context.masked_fill(~is_known, -1)
        last = loaded.ends.embed(torch.tensor([[5 + index]]))
        expected = module(last, fused[:, -1:], torch.tensor([[anchor]]), keys, values, context)
        torch.testing.assert_close(found[index], expected[0, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_arrives_piece_by_piece_gives_the_draft_of_the_whole(make: Make, sampling: SamplingParameters) -> None:
    whole = draft(make(), row(41, 0, [shown(0, 40)], sampling=sampling))
    pieces = draft(
        make(),
        row(9, 0, [shown(0, 8)], sampling=sampling, budget=DraftBudget(0, 0)),
        row(20, 9, [shown(8, 13), shown(13, 19)], sampling=sampling),
        row(41, 20, [shown(19, 40)], sampling=sampling),
    )
    assert pieces.tree == whole.tree and len(whole.tree) > 0
    assert set(whole.tree.tokens) <= set(VOCABULARY)


def test_a_batch_gives_the_drafts_of_single_rows(make: Make) -> None:
    rows = [
        row(length, 0, [shown(begin, length - 1)], name=f"{length}", sampling=sampling, budget=budget)
        for length, begin, sampling, budget in (
            (12, 0, GREEDY, BUDGET),
            (60, 30, SAMPLED, DraftBudget(3, 2)),
            (33, 20, GREEDY, DraftBudget(1, 1)),
        )
    ]
    batch = [proposal.tree for proposal in make().propose(rows)]
    assert batch == [make().propose([one])[0].tree for one in rows]
    assert [len(tree) for tree in batch][1:] == [3, 1]


def test_without_the_hidden_states_before_the_last_token_there_is_no_draft(make: Make) -> None:
    drafter = make()
    assert not len(draft(drafter, row(30, 0, [shown(0, 28)])).tree)
    assert len(draft(drafter, row(31, 30, [shown(29, 30)])).tree)  # position 28 stays unknown


def test_hidden_states_of_positions_that_are_not_committed_are_ignored(make: Make) -> None:
    expected = draft(make(), row(30, 0, [shown(0, 29)]))
    assert draft(make(), row(30, 0, [shown(0, 60)])).tree == expected.tree


def test_a_cut_sequence_is_drafted_for_as_if_it_had_never_been_longer(make: Make) -> None:
    drafter = make()
    draft(drafter, row(30, 0, [shown(0, 29)]))
    other = DraftRow(SequenceId("a"), 22, (91, 92), BUDGET, None, (shown(120, 121),))
    assert not len(drafter.propose([other])[0].tree)  # position 20 has another token now
    again = draft(drafter, row(25, 20, [shown(20, 24)]))
    assert again.tree == draft(make(), row(25, 0, [shown(0, 24)])).tree


class TestStore:
    def test_a_repeated_prompt_is_drafted_for_with_its_whole_context(self, make: Make) -> None:
        """The target finds the first 32 tokens in its cache and shows only the rest."""
        drafter = make()
        expected = draft(drafter, row(40, 0, [shown(0, 39)]))
        drafter.release([SequenceId("a")])
        cached = row(40, 0, [shown(32, 39)], name="b")
        assert draft(drafter, cached).tree == expected.tree
        without = draft(make(store_tokens=0), cached)
        assert without.tree != expected.tree and len(without.tree)

    def test_a_sequence_that_forks_a_running_one_shares_its_context(self, make: Make) -> None:
        drafter = make()
        expected = draft(make(), row(40, 0, [shown(0, 39)]))
        draft(drafter, row(20, 0, [shown(0, 19)]), row(40, 20, [shown(19, 39)]))
        assert draft(drafter, row(40, 0, [shown(32, 39)], name="fork")).tree == expected.tree

    def test_another_salt_finds_nothing(self, make: Make) -> None:
        drafter = make()
        expected = draft(drafter, row(40, 0, [shown(0, 39)], salt="one"))
        found = draft(drafter, row(40, 0, [shown(32, 39)], name="b", salt="two"))
        assert found.tree == draft(make(), row(40, 0, [shown(32, 39)])).tree != expected.tree

    def test_it_is_bounded(self, make: Make) -> None:
        drafter = make(store_tokens=32)
        draft(drafter, row(90, 0, [shown(60, 89)]), row(200, 0, [shown(0, 199)], name="b"))
        found = draft(drafter, row(90, 0, [shown(80, 89)], name="c"))
        assert found.tree == draft(make(), row(90, 0, [shown(80, 89)])).tree


def test_hidden_states_of_a_wrong_width_are_refused_and_other_rows_are_served(make: Make) -> None:
    wrong = Evidence(9, hidden=HiddenStates(0, SIZE, bytes(2 * SIZE * 8)))
    bad, good = make().propose([row(9, 0, [wrong]), row(9, 0, [shown(0, 8)], name="b")])
    assert bad.fault is not None and bad.fault.code is RowFaultCode.INVALID and "taps" in bad.fault.message
    assert good.fault is None and len(good.tree)


def test_more_sequences_than_are_kept_evict_the_least_recently_used_one(make: Make) -> None:
    drafter = make(sequences=2)
    for name in "abc":
        assert len(draft(drafter, row(9, 0, [shown(0, 8)], name=name)).tree)
    evicted = draft(drafter, row(10, 9, [shown(8, 9)], name="a"))
    assert evicted.fault is not None and evicted.fault.code is RowFaultCode.OUT_OF_SYNC
