"""The contract of every drafting method, row by row: valid proposals, faults of bad rows, complete releases."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest
from transformers import GenerationConfig

from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, EvidenceNeeds, NextTokens, RowFaultCode
from cluster.core.ids import SequenceId
from deploy.implied_settings import with_implied_settings
from tests.support.slow import slow_but
from tests.unit.draft.contract.methods import (
    DRAFTER_NAMES,
    SOURCED_NAMES_AND_PLACES,
    VOCABULARY,
    Directories,
    cases_of,
    values,
)
from tests.unit.draft.contract.rounds import SAMPLINGS, SMALL_VOCABULARY, SimulatedSequence, check_proposal, restarted
from workers.draft.common.sessions import Sessions
from workers.draft.registry import DraftMethod, create, needs_of
from workers.kv.allocator import BlockAllocator
from workers.kv.pool import KvPool
from workers.kv.sources import SourceStore
from workers.serve.configuration import load_configuration

ROOMY = DraftBudget(8, 5)
BUDGETS = (ROOMY, ROOMY, DraftBudget(3, 5), DraftBudget(5, 1), DraftBudget(1, 1), DraftBudget(0, 5), DraftBudget(4, 0))


class Subject:
    """A method and the evidence that it needs."""

    def __init__(self, method: DraftMethod, draft: DraftSection, decoder_start: tuple[int, ...]) -> None:
        self.method = method
        self.needs: EvidenceNeeds = needs_of(draft)
        self.keeps_sequences = all(case.keeps_sequences for case in cases_of("+".join(draft.selected("method"))))
        self.drafts = all(case.drafts for case in cases_of("+".join(draft.selected("method"))))
        self.decoder_start = decoder_start

    def sequences(self, seed: int = 0) -> list[SimulatedSequence]:
        """Sequences with different sampling parameters."""
        return [
            SimulatedSequence(
                f"s{number}",
                random.Random(seed * 10 + number),
                self.needs,
                sampling,
                decoder_start=self.decoder_start,
                has_usual_states=number != len(SAMPLINGS) - 1,
            )
            for number, sampling in enumerate(SAMPLINGS)
        ]

    def propose(self, *pairs: tuple[SimulatedSequence, DraftRow]) -> None:
        """Send rows in one batch, check the proposals, and let the target verify them."""
        proposals = self.method.propose([row for _, row in pairs])
        assert len(proposals) == len(pairs)
        for (sequence, row), proposal in zip(pairs, proposals, strict=True):
            check_proposal(row, proposal)
            sequence.sent_len = row.base_len
            sequence.verify(proposal.tree)

    def fault_of(self, row: DraftRow) -> RowFaultCode | None:
        """The fault of a row, whose tree is then empty."""
        proposal = self.method.propose([row])[0]
        assert not proposal.tree.tokens
        return None if proposal.fault is None else proposal.fault.code

    def expected(self, code: RowFaultCode) -> RowFaultCode | None:
        """The fault of a row that does not fit. A method that stores nothing answers it with the empty tree."""
        return code if self.keeps_sequences else None


SOURCED_NAMES = dict.fromkeys(name for name, _ in SOURCED_NAMES_AND_PLACES if name in DRAFTER_NAMES)
WITH_WEIGHTS = ("heads", "model", "model+suffix+prediction")
"""Methods to which the family of an encoder-decoder target makes a difference."""
CASES = [
    *(("llama", name) for name in DRAFTER_NAMES),
    *(("marian", name) for name in SOURCED_NAMES),
    *product(("bart", "t5", "t5_gated"), WITH_WEIGHTS),
]
FAST = [case for case in CASES if case[0] not in ("bart", "t5_gated")]


@pytest.fixture(scope="module", params=slow_but(FAST, CASES), ids="-".join)
def loaded(request: pytest.FixtureRequest, models: Callable[[str], Directories]) -> Subject:
    """A method, which serves one test after another: most of the time goes into loading it."""
    family, name = request.param
    directories = models(family)
    configuration = with_implied_settings(load_configuration(values(name, directories)))
    method = create(configuration.draft, configuration.target)
    assert not hasattr(method, "bind")
    return Subject(method, configuration.draft, decoder_start(directories.target))


@pytest.fixture
def subject(loaded: Subject) -> Iterator[Subject]:
    yield loaded
    loaded.method.release([SequenceId(one.name) for one in loaded.sequences()])
    loaded.method.release([SequenceId("bad")])


def decoder_start(directory: Path) -> tuple[int, ...]:
    """The tokens with which a decoder starts; none for a decoder-only model."""
    first = GenerationConfig.from_pretrained(directory)
    return tuple(one for one in (first.decoder_start_token_id, first.forced_bos_token_id) if one is not None)


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_every_proposal_is_valid_whatever_rows_come(subject: Subject, seed: int) -> None:
    draw = random.Random(seed)
    sequences = subject.sequences(seed)
    for _ in range(12):
        batch = [sequence for sequence in sequences if draw.random() < 0.8]  # the others have several steps at once
        for sequence in sequences:
            if sequence not in batch:
                sequence.verify(sequence_tree(subject, sequence))
            elif draw.random() < 0.15:
                sequence.replace_end()
        rows = [(sequence, sequence.row(draw.choice(BUDGETS))) for sequence in batch]
        if draw.random() < 0.2:
            rows = [(sequence, restarted(row, sequence)) for sequence, row in rows]
        subject.propose(*rows)


def sequence_tree(subject: Subject, sequence: SimulatedSequence) -> Any:
    """The tree of a proposal that came too late, or the empty tree."""
    return subject.method.propose([restarted(sequence.row(ROOMY), sequence)])[0].tree


def test_a_repeated_row_repeats_its_proposal(subject: Subject) -> None:
    sequence = subject.sequences()[0]
    subject.propose((sequence, sequence.row(ROOMY)))
    row = sequence.row(ROOMY)
    first = subject.method.propose([row])[0]
    assert subject.method.propose([row])[0].tree == first.tree
    check_proposal(row, first)


def test_the_first_tokens_of_a_draft_are_among_those_that_a_grammar_permits(subject: Subject) -> None:
    draw, sequence, drafted = random.Random(5), subject.sequences()[0], 0
    for _ in range(24):
        known = NextTokens(
            tuple(draw.sample(range(SMALL_VOCABULARY), draw.choice([0, 0, 1, 2]))),
            bytes(token % 3 != 1 for token in range(VOCABULARY)),
        )
        row = replace(sequence.row(ROOMY), next_tokens=known)
        found = subject.method.propose([row])[0]
        check_proposal(row, found)
        for token, depth in zip(found.tree.tokens, found.tree.depths(), strict=True):
            assert known.permits(depth - 1, token)
            drafted += 1
        sequence.sent_len = row.base_len
        sequence.verify(found.tree)
    assert bool(drafted) == subject.drafts


def test_a_row_after_a_gap_is_refused_until_the_sequence_is_sent_again(subject: Subject) -> None:
    sequence, beside, _ = subject.sequences()
    subject.propose((sequence, sequence.row(ROOMY)))
    sequence.verify(sequence_tree(subject, sequence))
    sequence.sent_len = len(sequence.tokens)
    sequence.tokens += [4, 5]
    gap = DraftRow(SequenceId(sequence.name), len(sequence.tokens) + 9, (4,), ROOMY)
    assert subject.fault_of(gap) == subject.expected(RowFaultCode.OUT_OF_SYNC)
    sequence.sent_len = 0
    subject.propose((sequence, sequence.row(ROOMY)), (beside, beside.row(ROOMY)))


def test_a_row_that_contradicts_itself_is_refused_and_the_others_are_served(subject: Subject) -> None:
    sequence, beside, _ = subject.sequences()
    good = sequence.row(ROOMY)
    wrong = [
        DraftRow(SequenceId("bad"), 1, (4, 5), ROOMY, sequence.start),
        DraftRow(SequenceId("bad"), 9, (4, 5), ROOMY, sequence.start),
        replace(good, sequence_id=SequenceId("bad"), start=replace(sequence.start, prompt_len=good.base_len + 1)),
    ]
    for row in wrong:
        assert subject.fault_of(row) == subject.expected(RowFaultCode.INVALID)
        refused, served = subject.method.propose([row, restarted(beside.row(ROOMY), beside)])
        assert not refused.tree.tokens and (refused.fault is not None) == subject.keeps_sequences
        assert served.fault is None
    subject.propose((sequence, good))


def test_a_late_row_of_an_earlier_length_is_answered_for_its_own_length(subject: Subject) -> None:
    sequence = subject.sequences()[1]
    early = sequence.row(ROOMY)
    subject.propose((sequence, early))
    subject.propose((sequence, sequence.row(ROOMY)))
    late = subject.method.propose([early])[0]
    check_proposal(early, late)
    sequence.sent_len = early.base_len
    sequence.evidence.clear()
    subject.propose((sequence, sequence.row(ROOMY)))


def test_a_release_frees_everything(subject: Subject) -> None:
    sequences = subject.sequences()
    for _ in range(3):
        subject.propose(*((sequence, sequence.row(ROOMY)) for sequence in sequences))
    subject.method.release([SequenceId("unknown"), *(SequenceId(one.name) for one in sequences)])
    subject.method.release([SequenceId(sequences[0].name)])
    for stored in reachable(subject.method):
        match stored:
            case Sessions():
                assert len(stored) == 0
            case SourceStore():
                assert len(stored) == 0
            case KvPool() | BlockAllocator():
                assert stored.blocks_free == stored.blocks_total
    assert subject.fault_of(sequences[0].row(ROOMY)) == subject.expected(RowFaultCode.OUT_OF_SYNC)


def reachable(root: object) -> Iterator[object]:
    """Objects that the root holds, through objects of this project, containers and closures."""
    seen = {id(root)}
    queue = [root]
    while queue:
        one = queue.pop()
        yield one
        for held in gc.get_referents(one):
            if id(held) not in seen and _may_hold_state(held):
                seen.add(id(held))
                queue.append(held)


def _may_hold_state(one: object) -> bool:
    if isinstance(one, dict):
        return "__builtins__" not in one  # the globals of a module
    is_ours = type(one).__module__.startswith(("workers.", "cluster."))
    return is_ours or isinstance(one, list | tuple | FunctionType | CellType)
