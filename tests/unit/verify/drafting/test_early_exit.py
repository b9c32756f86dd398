"""The method `early_exit`: the target drafts with a part of its layers, on its own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.config.sections import Configuration
from cluster.core.drafting import NO_DRAFT, DraftBudget, DraftRow, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.grammar import Grammar
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.colocated_decoding import decode_together, plain_answers
from tests.support.engines.engine_rows import first_row, open_row, verify
from tests.support.models import tiny, tiny_tokenizer
from workers.draft.registry import create, create_for_worker_rank, placement_of
from workers.model.draft_card import DraftCard
from workers.model.draft_shapes import ExitShape
from workers.serve.configuration import load_configuration
from workers.verify import build as build_module
from workers.verify.engine import TargetEngine

LAYERS = 3
BUDGET = DraftBudget(8, 4)
COUNT = 24
REQUESTS = {
    "greedy": ((5, 17, 33, 8, 60, 41, 41, 9), SamplingParameters(temperature=0.0)),
    "sampled": ((7, 7, 20), SamplingParameters(temperature=0.9, top_p=0.95, seed=7)),
    "penalties": ((11, 12, 13, 14, 15), SamplingParameters(temperature=0.7, presence_penalty=0.5, seed=3)),
    "logprobs": ((30, 31, 32, 33), SamplingParameters(temperature=0.0, logprobs=2, repetition_penalty=1.2)),
}

Open = Callable[..., TargetEngine]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=LAYERS))


def configure(directory: Path, early_exit: dict[str, Any], **drafting: Any) -> Configuration:
    draft = {"methods": ["early_exit"], "placement": "target", "early_exit": early_exit} | drafting
    target = {"path": str(directory), "device": "cpu", "compile": "off", "kv": {"block_size": 4}}
    return load_configuration({"target": target, "draft": draft})


@pytest.fixture
def open_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens an engine that drafts with a part of its layers; it must hold no block at the end."""
    opened: list[TargetEngine] = []

    def open_one(blocks: int = 200, drafting: dict[str, Any] | None = None, **early_exit: Any) -> TargetEngine:
        monkeypatch.setattr(build_module, "blocks_that_fit", lambda model, kv: blocks)
        configuration = configure(directory, early_exit, **(drafting or {}))
        method = create(configuration.draft, configuration.target)
        opened.append(build_module.build_engine(configuration.target, method=method))
        return opened[-1]

    with ExitStack() as stack:
        yield open_one
        for engine in opened:
            stack.callback(engine.close)
            occupancy = engine.release_all()
            assert occupancy.blocks_free == occupancy.blocks_total


PARTS: dict[str, dict[str, Any]] = {
    "the first third": {},
    "the first layer": {"layers": 1},
    "two layers, chains only": {"layers": 2, "candidates": 1},
    "one attention and one network skipped": {"skip_attention": [1], "skip_mlp": [2]},
    "two layers without the first network": {"layers": 2, "skip_mlp": [0], "stop_below": 0.0},
}


def test_without_a_setting_the_first_third_of_the_layers_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "workers.draft.early_exit")
    for layers, drafting in ((6, 2), (1, 1)):
        directory = tiny.save(tmp_path / str(layers), tiny.llama(num_hidden_layers=layers))
        found = []
        for settings in ({}, {"layers": drafting}):
            configuration = configure(directory, settings)
            engine = build_module.build_engine(
                configuration.target, method=create(configuration.draft, configuration.target)
            )
            answers = decode_together(engine.step, REQUESTS, COUNT, BUDGET)
            found.append([proposal.tree for one in answers.values() for proposal in one.proposals])
            engine.close()
        assert found[0] == found[1] and any(map(len, found[0]))
    assert "the first 2 of the target's 6 layers" in caplog.text


@pytest.mark.parametrize("part", sorted(PARTS))
def test_any_part_drafts_for_several_sequences_at_once_and_changes_no_token(part: str, open_engine: Open) -> None:
    engine = open_engine(**PARTS[part])
    expected = plain_answers(engine.step, REQUESTS, COUNT)
    engine.release_all()
    found = decode_together(engine.step, REQUESTS, COUNT, BUDGET)
    assert {name: one.answer[:COUNT] for name, one in found.items()} == expected
    assert sum(one.deepest for one in found.values()) > 0
    for one in found.values():
        for proposal in one.proposals:
            assert len(proposal.tree) <= BUDGET.max_nodes
            assert proposal.tree.depth() <= BUDGET.max_depth


class Listening:
    """A method that keeps the rows that it drafts for, with their proposals."""

    def __init__(self, method: DraftMethod) -> None:
        self.heard: list[tuple[DraftRow, Proposal]] = []
        self._propose = method.propose
        method.propose = self.propose  # type: ignore[method-assign]

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        found = self._propose(rows)
        self.heard += zip(rows, found, strict=True)
        return found


@pytest.mark.parametrize("layers", [1, LAYERS])
def test_drafts_begin_with_tokens_that_a_grammar_permits(layers: int, tmp_path: Path) -> None:
    target = tiny_tokenizer.byte_level(tmp_path)
    tiny.save(target, tiny.llama(num_hidden_layers=LAYERS, vocab_size=320))
    configuration = configure(target, {"layers": layers})
    method = create(configuration.draft, configuration.target)
    listening = Listening(method)
    engine = build_module.build_engine(configuration.target, method=method)
    grammar = Grammar.of_schema({"enum": ["a fish that swims", "hello, who is there?"]})
    requests = {"one": ((5, 17, 33), SamplingParameters(temperature=0.0, grammar=grammar))}
    expected = plain_answers(engine.step, requests, 12)
    listening.heard.clear()
    engine.release_all()
    found = decode_together(engine.step, requests, 12, BUDGET)["one"]
    engine.close()
    assert found.answer[:12] == expected["one"]
    forced = free = 0
    for row, proposal in listening.heard:
        known = row.next_tokens
        assert len(proposal.tree)
        for token, depth in zip(proposal.tree.tokens, proposal.tree.depths(), strict=True):
            assert known.permits(depth - 1, token)
            forced += depth <= len(known.forced)
            free += depth == len(known.forced) + 1 and any(known.allowed)
    assert forced and free


def test_all_layers_are_always_right(open_engine: Open) -> None:
    engine = open_engine(layers=LAYERS, candidates=1, stop_below=0.0)
    found = decode_together(engine.step, REQUESTS, COUNT, BUDGET)
    for one in found.values():
        assert all(len(proposal.tree) == BUDGET.max_depth for proposal in one.proposals)
        assert one.accepted == one.deepest > 0


def test_other_candidates_are_leaves_below_the_chain(open_engine: Open) -> None:
    engine = open_engine(drafting={"max_nodes": 12}, layers=LAYERS, candidates=3, stop_below=0.0)
    found = decode_together(engine.step, {"greedy": REQUESTS["greedy"]}, COUNT, DraftBudget(12, 4))["greedy"]
    assert found.accepted > 0
    for proposal in found.proposals:
        assert len(proposal.tree) == 12
        inner = set(proposal.tree.parents)
        assert len(inner) == proposal.tree.depth() == 4
        for node, parent in enumerate(proposal.tree.parents):
            above = 1.0 if parent < 0 else proposal.probabilities[parent]
            assert 0.0 <= proposal.probabilities[node] <= above


def test_an_improbable_chain_ends_early(open_engine: Open) -> None:
    engine = open_engine(layers=1, candidates=1, stop_below=0.5)
    found = decode_together(engine.step, REQUESTS, COUNT, BUDGET)
    proposals = [proposal for one in found.values() for proposal in one.proposals]
    assert min(len(proposal.tree) for proposal in proposals) == 1
    assert all(min(proposal.probabilities[:-1], default=1.0) >= 0.5 for proposal in proposals)


def test_nothing_is_drafted_after_a_token_that_ends_the_answer(open_engine: Open) -> None:
    engine = open_engine(layers=LAYERS, candidates=1, stop_below=0.0)
    prompt, sampling = REQUESTS["sampled"]
    answer = plain_answers(engine.step, {"a": (prompt, sampling)}, 5)["a"]
    engine.release_all()
    end = next(index for index, token in enumerate(answer) if token != answer[0])
    row = first_row("a", prompt, replace(sampling, end_token_ids=(answer[end],)))
    proposal = verify(engine, replace(row, next_budget=BUDGET)).proposal
    assert proposal is not None
    assert list(proposal.tree.tokens) == answer[1 : end + 1]


def test_without_free_blocks_there_is_no_draft_and_no_fault(open_engine: Open) -> None:
    prompt = tuple(range(10, 22))
    drafting = {"max_nodes": 8, "max_depth": 8}
    engine = open_engine(blocks=8, drafting=drafting, layers=LAYERS, candidates=1, stop_below=0.0)
    rows = [
        replace(first_row(name, prompt[::order]), next_budget=DraftBudget(8, 8))
        for name, order in (("a", 1), ("b", -1))
    ]
    result = engine.step(StepBatch(tuple(rows)))
    assert all(verdict.fault is None and len(verdict.tokens) == 1 for verdict in result.verdicts)
    drafts = [verdict.proposal for verdict in result.verdicts]
    assert [draft is not None and len(draft.tree) for draft in drafts] == [8, 0]  # the first one took both free blocks
    assert result.kv.blocks_free == 2


def test_drafted_keys_and_values_never_reach_the_prefix_cache_or_a_fork(open_engine: Open) -> None:
    prompt, sampling = REQUESTS["greedy"]
    alone = open_engine(layers=LAYERS)
    expected = plain_answers(alone.step, {"a": (prompt, sampling)}, 12)["a"]
    engine = open_engine(layers=1, candidates=1, stop_below=0.0)
    answers = decode_together(engine.step, {"a": (prompt, sampling)}, 12, DraftBudget(8, 8))
    text = answers["a"].tokens
    for name, parent in (("fork", "a"), ("later", None)):
        stored = engine.open([open_row(name, text, parent)]).stored_lens[0]
        assert 0 < stored < len(text)
        row = VerifyRow(SequenceId(name), len(text), tuple(text[stored:]), next_budget=BUDGET)
        forked = alone.open([open_row(name, text)]).stored_lens[0]
        plain = VerifyRow(SequenceId(name), len(text), tuple(text[forked:]))
        assert verify(engine, row).tokens == verify(alone, plain).tokens
        engine.release([SequenceId("a")])
    assert answers["a"].answer[:12] == expected


def test_a_row_without_a_budget_is_not_drafted_for(open_engine: Open) -> None:
    assert verify(open_engine(layers=1), first_row("a", REQUESTS["greedy"][0])).proposal is None


def test_it_combines_with_other_methods(open_engine: Open) -> None:
    engine = open_engine(drafting={"methods": ["ngram", "early_exit"]}, layers=LAYERS)
    expected = plain_answers(engine.step, REQUESTS, COUNT)
    engine.release_all()
    found = decode_together(engine.step, REQUESTS, COUNT, BUDGET)
    assert {name: one.answer[:COUNT] for name, one in found.items()} == expected
    assert all(one.accepted > 0 for one in found.values())


def save_exit(directory: Path, shape: ExitShape, weight: torch.Tensor) -> Path:
    from safetensors.torch import save_file

    directory.mkdir()
    save_file(
        {"weight": weight.to(torch.bfloat16)} if shape.has_norm else {"_": weight}, directory / "model.safetensors"
    )
    DraftCard("tiny", tiny.VOCABULARY, 48, (), None, "exit", (), shape).write(directory)
    return directory


def test_a_distilled_exit_brings_its_layers_and_its_norm(open_engine: Open, tmp_path: Path) -> None:
    ones = torch.ones(48)
    own = open_engine(path=str(save_exit(tmp_path / "own", ExitShape((0, 2), has_norm=True), ones)), candidates=1)
    negative = open_engine(path=str(save_exit(tmp_path / "no", ExitShape((0, 2), has_norm=True), -ones)), candidates=1)
    without = open_engine(skip_attention=[1], skip_mlp=[1], candidates=1)
    found = [decode_together(one.step, REQUESTS, COUNT, BUDGET) for one in (own, without, negative)]
    trees = [[proposal.tree for one in answers.values() for proposal in one.proposals[:1]] for answers in found]
    assert trees[0] == trees[1] != trees[2]  # a fresh model's final norm is all ones
    answers = [{name: one.answer[:COUNT] for name, one in each.items()} for each in found]
    assert answers[0] == answers[1] == answers[2]


def test_a_wrong_part_is_refused_with_its_bound(open_engine: Open, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="layers: 4 is refused; it must be between 1 and 3"):
        open_engine(layers=4)
    with pytest.raises(ConfigurationError, match="skip_mlp: 7 is refused"):
        open_engine(skip_mlp=[7])
    with pytest.raises(ConfigurationError, match="layer 5 is refused; the target has 3 layers"):
        open_engine(path=str(save_exit(tmp_path / "deep", ExitShape((0, 5)), torch.ones(48))))
    with pytest.raises(ConfigurationError, match="must not be set together"):
        configure(directory, {"path": "somewhere", "layers": 2})
    with pytest.raises(ConfigurationError, match="early_exit drafts only on the target"):
        placement_of(configure(directory, {"layers": 1}, placement="drafter").draft)


def test_without_a_target_it_raises(directory: Path) -> None:
    configuration = configure(directory, {"layers": 1})
    with pytest.raises(RuntimeError, match="must be bound first"):
        create(configuration.draft, configuration.target).propose([DraftRow(SequenceId("a"), 1, (5,), NO_DRAFT)])


def test_worker_ranks_run_only_the_methods_that_compute_with_the_target(directory: Path) -> None:
    for methods, has_one in ((["early_exit", "ngram"], True), (["ngram"], False)):
        configuration = configure(directory, {"layers": 1}, methods=methods)
        found = create_for_worker_rank(configuration.draft, configuration.target)
        assert (found is not None) == has_one
