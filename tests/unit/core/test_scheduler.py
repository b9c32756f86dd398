"""The scheduler, case by case: admission, preemption, and the tokens of each row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.core.config.sections import SchedulerSection
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.kv import KvGroup, KvLayout, KvOccupancy
from cluster.core.scheduling.scheduler import plan
from cluster.core.scheduling.state import Plan, PlannedRow, SequenceView, State

NONE = DraftBudget(0, 0)
LAYOUT = KvLayout(4)


def view(arrival: int, length: int, stored: int = 0, remaining: int = 100) -> SequenceView:
    return SequenceView(SequenceId(f"s{arrival}"), arrival, length, stored, remaining)


def decoding(arrival: int, length: int = 9, remaining: int = 100) -> SequenceView:
    return view(arrival, length, length - 1, remaining)


def decide(
    waiting: tuple[SequenceView, ...] = (),
    running: tuple[SequenceView, ...] = (),
    *,
    free: int = 1000,
    total: int = 1000,
    tokens: int = 64,
    sequences: int = 8,
    draft: DraftBudget = NONE,
    context: int = 1000,
    prompt_tokens: int | None = None,
    layout: KvLayout = LAYOUT,
) -> Plan:
    """Blocks of four tokens, unless `layout` says otherwise."""
    limits = SchedulerSection(max_sequences=sequences, max_step_tokens=tokens, max_prompt_tokens=prompt_tokens)
    return plan(State(waiting, running, KvOccupancy(total, free), layout, context, limits, max_draft=draft))


def pending(result: Plan) -> dict[str, int]:
    return {row.sequence_id: row.pending for row in result.rows}


def nodes(result: Plan) -> dict[str, int]:
    return {row.sequence_id: row.draft.max_nodes for row in result.rows}


# --- tokens -------------------------------------------------------------------------------------


def test_without_sequences_the_plan_is_empty() -> None:
    assert decide() == Plan()


def test_a_short_prompt_is_sent_whole_and_decides_at_once() -> None:
    assert decide((view(1, 10),)) == Plan((SequenceId("s1"),), (), (PlannedRow(SequenceId("s1"), 10, True, NONE),))


def test_a_long_prompt_is_sent_in_chunks_and_decides_with_its_last() -> None:
    first = decide((view(1, 100),))
    assert (pending(first), first.rows[0].decide) == ({"s1": 64}, False)
    second = decide((), (view(1, 100, 64),))
    assert (pending(second), second.rows[0].decide) == ({"s1": 36}, True)


def test_prompt_chunks_fill_what_decoding_rows_leave() -> None:
    result = decide((view(3, 100),), (decoding(1), decoding(2)))
    assert pending(result) == {"s1": 1, "s2": 1, "s3": 62}


def test_a_younger_prompt_gets_the_tokens_that_the_older_leaves() -> None:
    assert pending(decide((view(1, 50), view(2, 50)))) == {"s1": 50, "s2": 14}


def test_prompts_that_go_last_get_the_tokens_and_blocks_that_other_prompts_leave() -> None:
    late = replace(view(1, 64), goes_last=True)
    assert pending(decide((view(2, 50),), (late,))) == {"s1": 14, "s2": 50}
    assert pending(decide((), (late, view(2, 50)), free=14)) == {"s1": 4, "s2": 50}
    assert pending(decide((), (late,))) == {"s1": 64}


def test_a_prompt_that_goes_last_keeps_its_place_and_the_blocks_that_it_will_need() -> None:
    late = replace(view(1, 64), goes_last=True)
    assert decide((view(2, 50),), (late,), sequences=1).admit == ()
    assert decide((view(2, 50),), (late,), free=30).admit == ()
    assert decide((view(2, 50),), (late,), free=31).admit == ("s2",)


def test_trees_share_evenly_the_tokens_that_are_not_reserved_for_the_oldest_prompt() -> None:
    running = (decoding(1), decoding(2), view(3, 200, 64))
    result = decide((), running, tokens=32, draft=DraftBudget(16, 16))
    assert pending(result) == {"s1": 1, "s2": 1, "s3": 14}
    assert nodes(result) == {"s1": 8, "s2": 8, "s3": 0}


def test_trees_shrink_to_nothing_before_the_oldest_prompt_gets_no_token() -> None:
    running = (*(decoding(index) for index in range(1, 16)), view(20, 200, 64))
    result = decide((), running, tokens=16, sequences=16, draft=DraftBudget(8, 8))
    assert pending(result) == {**{f"s{index}": 1 for index in range(1, 16)}, "s20": 1}
    assert not any(nodes(result).values())


def test_tokens_that_a_small_tree_leaves_go_to_the_others() -> None:
    running = (decoding(1), decoding(2), decoding(3))
    result = decide((), running, tokens=16, draft=DraftBudget(6, 6))
    assert sum(nodes(result).values()) == 13
    assert nodes(result) == {"s1": 4, "s2": 4, "s3": 5}


def test_a_tree_is_less_deep_than_the_tokens_left_in_the_answer_and_the_context() -> None:
    budget = DraftBudget(16, 8)
    ending, last = decoding(1, remaining=4), decoding(2, remaining=1)
    brim = decoding(3, length=997)
    result = decide((), (ending, last, brim), tokens=512, draft=budget, context=1000)
    assert [row.draft for row in result.rows] == [DraftBudget(16, 3), NONE, DraftBudget(16, 3)]


@pytest.mark.parametrize(
    ("bound", "granted"),
    [
        ({"draft": DraftBudget(0, 8)}, 0),
        ({"draft": DraftBudget(3, 8)}, 3),
        ({"draft": DraftBudget(99, 9)}, 8),
        ({"draft": DraftBudget(3, 0)}, 0),
        ({"max_draft_tokens": 0}, 0),
        ({"max_draft_tokens": 3}, 3),
        ({"max_draft_tokens": 3, "draft": DraftBudget(5, 5)}, 3),
    ],
    ids=str,
)
def test_a_sequence_may_have_a_smaller_tree_and_the_others_get_the_rest(bound: dict[str, Any], granted: int) -> None:
    bounded = replace(decoding(1), **bound)
    result = decide((), (bounded, decoding(2)), tokens=18, draft=DraftBudget(64, 8))
    assert nodes(result) == {"s1": granted, "s2": 16 - granted}
    assert result.rows[0].draft.max_depth == min(granted, 8)


def test_a_prompt_that_decides_gets_a_tree_from_the_tokens_left() -> None:
    result = decide((view(1, 10),), draft=DraftBudget(8, 4))
    assert result.rows[0].draft == DraftBudget(8, 4)
    undecided = decide((view(1, 100),), draft=DraftBudget(8, 4))
    assert undecided.rows[0].draft == NONE


# --- the time between tokens ---------------------------------------------------------------------


def test_prompts_together_stay_within_their_budget_while_others_decode() -> None:
    running = (decoding(1), view(2, 100), view(3, 100))
    assert pending(decide((), running, prompt_tokens=20)) == {"s1": 1, "s2": 20}
    assert pending(decide((), running, prompt_tokens=40)) == {"s1": 1, "s2": 40}
    assert pending(decide((), (decoding(1), view(2, 15, 5), view(3, 100)), prompt_tokens=16)) == {
        "s1": 1,
        "s2": 10,
        "s3": 6,
    }


def test_prompts_fill_the_step_while_no_sequence_decodes() -> None:
    assert pending(decide((), (view(2, 100), view(3, 100)), prompt_tokens=8)) == {"s2": 64}


def test_a_decoding_sequence_that_lacks_a_block_does_not_limit_prompts() -> None:
    stalled = decoding(2, length=9)  # its next token needs a block, and no younger sequence has one
    assert pending(decide((), (view(1, 100, 9), stalled), free=0, prompt_tokens=1, tokens=16)) == {"s1": 3}


def test_tokens_that_the_prompt_budget_leaves_go_to_trees() -> None:
    result = decide((), (decoding(1), view(2, 200)), tokens=32, prompt_tokens=4, draft=DraftBudget(64, 64))
    assert (pending(result), nodes(result)) == ({"s1": 1, "s2": 4}, {"s1": 27, "s2": 0})


# --- windows ------------------------------------------------------------------------------------

WINDOWED = KvLayout(4, (KvGroup(tables=1), KvGroup(tables=5, window=8)))


def test_a_new_block_is_needed_in_every_table() -> None:
    sliding = decoding(1, length=17)  # 16 stored: the seventeenth needs a block of each of the six tables
    assert pending(decide((), (sliding,), free=6, layout=WINDOWED)) == {"s1": 1}
    assert pending(decide((), (sliding,), free=5, layout=WINDOWED)) == {}


def test_a_preempted_sequence_frees_the_blocks_of_its_windows() -> None:
    old, young = decoding(1, length=17), view(2, 200, 40)
    assert WINDOWED.held(40) == 10 + 5 * 2
    result = decide((), (old, young), free=0, layout=WINDOWED, tokens=16)
    assert result.preempt == ("s2",)
    assert pending(result) == {"s1": 1}


def test_a_long_prompt_is_admitted_by_the_most_blocks_of_its_windows() -> None:
    need = WINDOWED.peak(200, 16)
    assert need < KvLayout(4, (KvGroup(tables=6),)).peak(200, 16)
    assert decide((view(2, 200),), (decoding(1, length=8),), free=need + 12, layout=WINDOWED, tokens=16).admit == (
        "s2",
    )
    assert decide((view(2, 200),), (decoding(1, length=8),), free=need + 11, layout=WINDOWED, tokens=16).admit == ()


# --- admission ----------------------------------------------------------------------------------


def test_admission_is_by_arrival_up_to_the_bound() -> None:
    result = decide((view(3, 4), view(1, 4), view(2, 4)), sequences=2)
    assert result.admit == ("s1", "s2")


def test_a_request_waits_until_there_are_blocks_for_its_whole_length_and_one_more() -> None:
    running = (decoding(1, length=8),)  # its next token needs a block of its own
    assert decide((view(2, 8),), running, free=4).admit == ("s2",)
    assert decide((view(2, 8),), running, free=3).admit == ()


def test_blocks_that_a_waiting_sequence_will_share_are_not_counted() -> None:
    sibling = SequenceView(SequenceId("s2"), 2, 80, 0, 100, shared_len=79)  # twenty blocks, the last one to be copied
    assert decide((sibling,), (decoding(1, length=8),), free=3).admit == ("s2",)
    assert decide((sibling,), (decoding(1, length=8),), free=2).admit == ()


def test_blocks_that_admitted_prompts_still_need_are_reserved() -> None:
    filling = view(1, 40, 8)
    assert decide((view(2, 8),), (filling,), free=12).admit == ("s2",)
    assert decide((view(2, 8),), (filling,), free=11).admit == ()


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    assert decide((view(1, 400), view(2, 4)), (decoding(0),), free=50).admit == ()


def test_a_single_request_may_use_the_whole_pool() -> None:
    assert decide((view(1, 40),), free=10, total=10).admit == ("s1",)


def test_there_are_never_more_sequences_than_tokens_in_a_step() -> None:
    waiting = tuple(view(index, 2) for index in range(40))
    assert len(decide(waiting, tokens=16, sequences=64).admit) == 16


# --- preemption ---------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_for_older_ones() -> None:
    running = (decoding(1, length=9), decoding(2, length=9), decoding(3, length=9))
    result = decide((view(4, 4),), running, free=0)
    assert result.preempt == ("s3",)
    assert pending(result) == {"s1": 1, "s2": 1}
    assert result.admit == ()


def test_a_sequence_that_needs_no_block_is_not_stopped_by_a_full_pool() -> None:
    running = (decoding(1, length=10), decoding(2, length=11))
    result = decide((), running, free=0)
    assert result.preempt == ()
    assert pending(result) == {"s1": 1, "s2": 1}


def test_the_latest_arrival_itself_waits_with_its_blocks() -> None:
    running = (decoding(1, length=10), decoding(2, length=9))
    result = decide((), running, free=0)
    assert result.preempt == ()
    assert pending(result) == {"s1": 1}


def test_the_oldest_prompt_preempts_younger_sequences() -> None:
    running = (view(1, 100, 40), decoding(2, length=20))
    result = decide((), running, free=0)
    assert result.preempt == ("s2",)
    assert pending(result)["s1"] > 0


def test_trees_never_preempt_a_sequence() -> None:
    running = (decoding(1, length=10), decoding(2, length=10))
    result = decide((), running, free=0, draft=DraftBudget(8, 8))
    assert result.preempt == ()
    assert nodes(result) == {"s1": 2, "s2": 2}


# --- sources of encoder-decoder models ----------------------------------------------------------


def sourced(arrival: int, source_len: int) -> SequenceView:
    return replace(view(arrival, 1), source_len=source_len)


def test_sources_read_together_take_at_most_the_tokens_of_a_step() -> None:
    waiting = tuple(sourced(arrival, 30) for arrival in range(4))
    assert decide(waiting).admit == ("s0", "s1")


def test_while_others_run_sources_take_at_most_the_prompt_tokens_of_a_step() -> None:
    waiting = tuple(sourced(arrival, 10) for arrival in range(1, 5))
    assert decide(waiting, (decoding(0),), prompt_tokens=25).admit == ("s1", "s2")


def test_a_source_longer_than_a_step_is_read_alone_and_forks_of_it_follow() -> None:
    assert decide((sourced(0, 500), sourced(1, 0), sourced(2, 1))).admit == ("s0", "s1")


def test_a_source_needs_blocks_of_its_own() -> None:
    waiting = (sourced(0, 12), sourced(1, 12))
    assert decide(waiting, free=8).admit == ("s0",)  # 3 + 1 blocks, then 3 + 1 and one more
    assert decide(waiting, free=9).admit == ("s0", "s1")


def test_sources_that_running_sequences_have_not_read_count_as_well() -> None:
    waiting = tuple(sourced(arrival, 10) for arrival in range(2, 6))
    assert decide(waiting, (decoding(0), sourced(1, 10)), prompt_tokens=25).admit == ("s2",)
    assert decide(waiting, (decoding(0), sourced(1, 20)), prompt_tokens=25).admit == ()
    assert decide((sourced(2, 12),), (sourced(1, 12),), free=8).admit == ()  # 1 + 3 blocks, then 3 + 1 and one more
    assert decide((sourced(2, 12),), (sourced(1, 12),), free=9).admit == ("s2",)


def test_trees_leave_the_blocks_of_sources_that_are_not_read_yet() -> None:
    running = (replace(view(1, 8), source_len=12),)  # 2 blocks, and 3 of its source
    assert nodes(decide((), running, free=5, draft=DraftBudget(8, 8))) == {"s1": 0}
    assert nodes(decide((), running, free=6, draft=DraftBudget(8, 8))) == {"s1": 4}


def test_preempting_a_sequence_frees_the_blocks_that_its_source_would_take() -> None:
    running = (decoding(1, length=9), replace(view(2, 1), source_len=12), decoding(3, length=9))
    assert decide((), running, free=3).preempt == ("s3",)
    assert decide((), running, free=1).preempt == ("s3", "s2")
