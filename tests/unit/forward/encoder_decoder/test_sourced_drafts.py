"""A draft model with an encoder drafts what it would write itself, for any source, memory and neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import TokenTree
from tests.support.engines.engine_sequence import GREEDY, some_tokens
from tests.support.engines.sourced import SOURCE, SourcedModel, greedy_answer
from workers.draft.common.trees.expansion_settings import ExpansionSettings
from workers.draft.common.trees.tree_drafter import TreeDrafter
from workers.draft.model.model_expander import ModelExpander
from workers.kv.pool import KvPool
from workers.model.loading import load_model

pytestmark = pytest.mark.slow

SOURCES = (SOURCE, (7, 2), tuple(some_tokens(21, 1)), tuple(some_tokens(12, 2)))
BUDGET = DraftBudget(4, 4)
WIDE = DraftBudget(8, 4)
COUNT = 16
Mode = Literal["serial", "run_ahead", "enumerate"]


class SourcedDrafter:
    """A drafter with an encoder-decoder model."""

    def __init__(self, directory: Path, blocks: int, target: Path | None = None, mode: Mode = "serial") -> None:
        model = load_model(ModelSection(path=str(directory), device="cpu"), target_directory=target)
        assert model.source is not None
        self.model = model
        self.start = model.source.defaults.decoder_start
        self.pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks, truncatable=True)
        expander = ModelExpander(model, self.pool, 1)
        draft = DraftSection(max_nodes=8, max_depth=4)
        self.drafter = TreeDrafter(expander, ExpansionSettings(mode=mode), draft, clock=lambda: 0.0)

    def first(
        self, source: Sequence[int], name: str = "a", answer: Sequence[int] = (), budget: DraftBudget = BUDGET
    ) -> DraftRow:
        """The first row of a sequence."""
        tokens = (*self.start, *answer)
        start = SequenceStart(len(self.start), GREEDY, source=tuple(source))
        return DraftRow(SequenceId(name), len(tokens), tokens, budget, start)

    def propose(self, *rows: DraftRow) -> tuple[Proposal, ...]:
        """The proposals, which have no faults."""
        found = self.drafter.propose(rows)
        assert all(proposal.fault is None for proposal in found)
        return found


@pytest.mark.parametrize("blocks", [300, 30])
def test_it_drafts_its_own_greedy_answer_for_every_source(model: SourcedModel, blocks: int) -> None:
    drafter = SourcedDrafter(model.directory, blocks)
    reference = model.reference()
    answers = [greedy_answer(reference, source, COUNT + 4) for source in SOURCES]
    rows = [drafter.first(source, f"s{index}") for index, source in enumerate(SOURCES)]
    drafted = 0
    for length in range(0, COUNT, 4):
        for proposal, answer in zip(drafter.propose(*rows), answers, strict=True):
            expected = TokenTree.chain(answer[length : length + 4])
            assert proposal.tree in (expected, TokenTree())  # without room there is no draft
            drafted += len(proposal.tree)
        rows = [
            replace(row, base_len=row.base_len + 4, new_tokens=tuple(answer[length : length + 4]), start=None)
            for row, answer in zip(rows, answers, strict=True)
        ]
    assert drafted == (len(SOURCES) * COUNT if blocks == 300 else drafted) > 0
    drafter.drafter.release([row.sequence_id for row in rows])
    assert drafter.pool.blocks_free == drafter.pool.blocks_total


@pytest.mark.parametrize("mode", ["run_ahead", "enumerate"])
def test_trees_that_grow_between_calls_read_the_source(model: SourcedModel, mode: Mode) -> None:
    """Wherever a node was expanded, its first child is what `transformers` decides there."""
    drafter, reference = SourcedDrafter(model.directory, 300, mode=mode), model.reference()
    answers = [greedy_answer(reference, source, COUNT) for source in SOURCES]
    rows = [drafter.first(source, f"s{index}", budget=WIDE) for index, source in enumerate(SOURCES)]
    ready = 0
    for length in range(0, COUNT, 4):
        for proposal, source, answer in zip(drafter.propose(*rows), SOURCES, answers, strict=True):
            tree, known = proposal.tree, [*drafter.start, *answer[:length]]
            ready += proposal.ready
            for node in {*tree.parents}:
                decided = decided_after(reference, source, [*known, *tree.path_tokens(node)])
                children = [tree.tokens[child] for child, parent in enumerate(tree.parents) if parent == node]
                assert decided in children
        while drafter.drafter.run_ahead():
            pass
        rows = [
            replace(row, base_len=row.base_len + 4, new_tokens=tuple(answer[length : length + 4]), start=None)
            for row, answer in zip(rows, answers, strict=True)
        ]
    assert ready > 0
    drafter.drafter.release([row.sequence_id for row in rows])
    assert drafter.pool.blocks_free == drafter.pool.blocks_total


def decided_after(reference: Any, source: Sequence[int], written: Sequence[int]) -> int:
    """The greedy token of `transformers` after the decoder's start and an answer."""
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([list(source)]), decoder_input_ids=torch.tensor([list(written)]))
    return int(logits.logits[0, -1].argmax())


@pytest.mark.parametrize("mode", ["serial", "enumerate"])
def test_an_answer_is_not_computed_between_calls_before_its_source_has_room(model: SourcedModel, mode: Mode) -> None:
    """A row without a budget opens no source."""
    drafter, other = (SourcedDrafter(model.directory, 100, mode=mode) for _ in range(2))
    answer = greedy_answer(model.reference(), SOURCE, 28)
    row = drafter.first(SOURCE, answer=answer[:24])
    drafter.propose(replace(row, budget=NO_DRAFT))
    while drafter.drafter.run_ahead():
        pass
    (found,), (expected,) = drafter.propose(row), other.propose(row)
    assert found.tree == expected.tree == TokenTree.chain(answer[24:])
    assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-4)


def test_another_source_for_the_same_sequence_is_read_anew(marian: SourcedModel) -> None:
    drafter, reference = SourcedDrafter(marian.directory, 100), marian.reference()
    for source in (SOURCES[0], SOURCES[2], SOURCES[0]):
        (proposal,) = drafter.propose(drafter.first(source, answer=()))
        assert proposal.tree == TokenTree.chain(greedy_answer(reference, source, 4))


def test_one_sequence_evicts_another_and_its_source(marian: SourcedModel) -> None:
    drafter, reference = SourcedDrafter(marian.directory, 12), marian.reference()
    long = tuple(some_tokens(24, 5))
    for turn in range(3):
        for name, source in (("a", long), ("b", SOURCES[2])):
            answer = greedy_answer(reference, source, 4)
            (proposal,) = drafter.propose(drafter.first(source, f"{name}{turn}"))
            assert proposal.tree == TokenTree.chain(answer)


def test_a_distilled_draft_has_the_encoder_of_its_target(marian: SourcedModel, tmp_path: Path) -> None:
    from workers.distill.seq2seq_data import decoder_start
    from workers.distill.seq2seq_student import make_seq2seq_student
    from workers.distill.student import StudentPlan, export
    from workers.distill.target_model import load_seq2seq_target

    target = load_seq2seq_target(marian.directory, torch.device("cpu"))
    vocabulary = tuple(range(0, 96, 2))
    student = make_seq2seq_student(target, StudentPlan((1,), vocabulary=vocabulary), decoder_start(target), 0)
    with torch.no_grad():
        for parameter in student.own_parameters().values():
            parameter.copy_(parameter.bfloat16())
    export(student, tmp_path / "draft", marian.directory.name, "", {})
    drafter = SourcedDrafter(tmp_path / "draft", 100, target=marian.directory)
    assert drafter.model.vocabulary_size == 96
    for source in SOURCES:
        (proposal,) = drafter.propose(drafter.first(source))
        written = [*drafter.start]
        with torch.inference_mode():
            memory = target.get_encoder()(input_ids=torch.tensor([source])).last_hidden_state
            for _ in range(4):
                decoded = student.eval().module.get_decoder()(
                    input_ids=torch.tensor([written]), encoder_hidden_states=memory, use_cache=False
                )
                best = student.logits(decoded.last_hidden_state[0, -1:]).argmax(dim=-1)
                written.append(int(student.tokens_of(best)))
        ends = [place + 1 for place, token in enumerate(written[1:]) if token in drafter.model.eos_token_ids]
        expected = written[1:] if not ends else written[1 : ends[0] + 1]
        assert proposal.tree == TokenTree.chain(expected)
