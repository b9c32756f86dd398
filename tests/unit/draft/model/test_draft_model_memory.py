"""The draft model drafts its own decisions also when rows fail, memory is full, or tokens are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.models import tiny, tiny_tokenizer
from tests.support.models.draft_model import (
    GREEDY,
    PENALISED,
    PROMPT,
    SAMPLED,
    DraftModelHarness,
    ReferenceModel,
    first_row,
    next_row,
)
from workers.draft.registry import create
from workers.forward.loaded_model import LoadedModel
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration


def test_a_full_pool_evicts_the_least_recently_used_sequence_but_keeps_its_tokens(
    loaded: LoadedModel, reference: ReferenceModel
) -> None:
    harness = DraftModelHarness(loaded, blocks=8)  # room for two sequences of 15 tokens
    for name in "abc":
        assert len(harness.propose(first_row(PROMPT, name))[0].tree) == 8
    tokens = (*PROMPT, 4)
    assert harness.propose(next_row(tokens, 1, "c"))[0].fault is None
    assert harness.row_lengths[0] == [1]  # the latest one is still stored
    again = harness.propose(next_row(tokens, 1, "a"))[0]
    assert again.tree == TokenTree.chain(reference.continued(tokens, 8, GREEDY, 8))
    assert harness.row_lengths[0] == [9]  # the oldest one was computed again


def test_a_row_without_room_gets_an_empty_tree_and_the_others_get_theirs(
    loaded: LoadedModel, reference: ReferenceModel
) -> None:
    harness = DraftModelHarness(loaded, blocks=5)
    huge, small = harness.propose(first_row(PROMPT * 4, "huge"), first_row(PROMPT, "small"))
    assert huge == Proposal(SequenceId("huge"), 32, EMPTY_TREE)
    assert small.tree == TokenTree.chain(reference.continued(PROMPT, 8, GREEDY, 8))


def test_a_row_without_room_frees_its_blocks_for_the_rows_beside_it(loaded: LoadedModel) -> None:
    harness = DraftModelHarness(loaded, blocks=6)
    harness.propose(first_row(PROMPT, "long"))
    extended = (*PROMPT, *(4 + step for step in range(16)))
    starved, fed = harness.propose(next_row(extended, 16, "long"), first_row(PROMPT * 2, "fed"))
    assert (len(starved.tree), len(fed.tree)) == (0, 8)


def test_nan_logits_end_their_own_chain_only(
    harness: DraftModelHarness, reference: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = harness.expander._runner.forward

    def spoilt(rows):
        logits = forward(rows).clone()
        if len(harness.row_lengths) == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(harness.expander._runner, "forward", spoilt)
    broken, fine = harness.propose(first_row(PROMPT, "broken"), first_row(PROMPT, "fine"))
    expected = reference.continued(PROMPT, 8, GREEDY, 8)
    assert broken.tree == TokenTree.chain(expected[:2])
    assert fine.tree == TokenTree.chain(expected)


def test_a_failed_forward_pass_leaks_no_blocks_and_the_next_one_is_correct(
    harness: DraftModelHarness, reference: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(harness.expander._runner, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            harness.propose(first_row(PROMPT))
    assert harness.blocks_held == 0
    tokens = (*PROMPT, 4)
    assert harness.propose(next_row(tokens, 1))[0].tree == TokenTree.chain(reference.continued(tokens, 8, GREEDY, 8))


def test_a_draft_with_a_sliding_window_can_be_truncated_to_before_the_window(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.mistral(sliding_window=6))
    reference = ReferenceModel(directory)
    harness = DraftModelHarness(load_model(ModelSection(path=str(directory), device="cpu")))
    tokens = list(PROMPT * 3)
    assert harness.propose(first_row(tokens))[0].tree == TokenTree.chain(reference.continued(tokens, 8, GREEDY, 24))
    shorter = [*tokens[:9], 3]
    assert harness.propose(first_row(shorter))[0].tree == TokenTree.chain(reference.continued(shorter, 8, GREEDY, 10))
    assert harness.row_lengths[0] == [1]


names = st.sampled_from("abc")
sides = st.tuples(names, st.integers(0, 9), st.lists(st.integers(0, 95), min_size=1, max_size=3), st.integers(0, 4))


@pytest.mark.slow
@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(sides, min_size=1, max_size=3, unique_by=lambda side: side[0]), min_size=1, max_size=6))
def test_after_any_acceptance_rejection_truncation_or_eviction_every_draft_is_the_models_own(
    loaded: LoadedModel, reference: ReferenceModel, rounds: list[list[tuple[str, int, list[int], int]]]
) -> None:
    harness = DraftModelHarness(loaded, blocks=9, most_forward_tokens=7)
    committed = {name: list(PROMPT[: 2 + place]) for place, name in enumerate("abc")}
    drafted: dict[str, tuple[int, ...]] = dict.fromkeys("abc", ())
    started: set[str] = set()
    for sides_taken in rounds:
        rows = []
        for name, accepted, own, rewound in sides_taken:
            known_len = max(1, len(committed[name]) - rewound)
            kept = [*committed[name], *drafted[name][:accepted]] if rewound == 0 else committed[name][:known_len]
            committed[name] = [*kept, *own][:40]
            budget = DraftBudget(4, 4)
            row = next_row(committed[name], len(committed[name]) - known_len, name, budget)
            rows.append(row if name in started else first_row(committed[name], name, SAMPLED, budget, prompt_len=2))
            started.add(name)
        for (name, *_), proposal in zip(sides_taken, harness.propose(*rows), strict=True):
            assert proposal.fault is None
            drafted[name] = proposal.tree.tokens
            expected = reference.continued(committed[name], 4, SAMPLED, 2)
            assert list(drafted[name]) in ([], expected)  # empty where the pool has no room
    harness.release_all()
    assert harness.blocks_held == 0


def drafted_by(directory: Path, **settings: object) -> DraftSection:
    model = {"path": str(directory), "device": "cpu"} | settings
    return load_configuration({"draft": {"method": "model", "model": model}}).draft


def test_a_draft_with_the_same_tokenizer_and_other_padding_is_accepted(tmp_path: Path) -> None:
    target = tiny.save(tmp_path / "target", tiny.llama(vocab_size=320))
    draft = tiny.save(tmp_path / "draft", tiny.llama(vocab_size=352), seed=1)
    for directory in (target, draft):
        tiny_tokenizer.byte_level(directory)
    create(drafted_by(draft), TargetSection(path=str(target), device="cpu"))


def test_a_draft_with_another_vocabulary_is_refused_with_both_sizes(directory: Path, tmp_path: Path) -> None:
    target = tiny.save(tmp_path, tiny.llama(vocab_size=100))
    with pytest.raises(ConfigurationError, match=r"96 tokens and the target .* one of 100"):
        create(drafted_by(directory), TargetSection(path=str(target)))


def test_the_method_is_created_from_its_configuration(directory: Path, reference: ReferenceModel) -> None:
    section = drafted_by(directory, kv={"pool_bytes": 1 << 20}, candidates=1)
    method = create(section, TargetSection(path=str(directory)))
    likeliest = reference.continued(PROMPT, section.max_nodes, GREEDY, len(PROMPT))
    assert method.propose([first_row(PROMPT)])[0].tree == TokenTree.chain(likeliest)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_draft_on_a_gpu_drafts_the_same_as_on_a_cpu(
    directory: Path, reference: ReferenceModel, sampling: SamplingParameters
) -> None:
    harness = DraftModelHarness(load_model(ModelSection(path=str(directory), device="cuda")))
    drafted = harness.propose(first_row(PROMPT, sampling=sampling))[0].tree
    assert drafted == TokenTree.chain(reference.continued(PROMPT, 8, sampling, len(PROMPT)))
