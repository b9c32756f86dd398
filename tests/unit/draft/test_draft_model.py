"""The draft model guesses what it would itself decide, whatever it holds, lost, or shares a batch with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from cluster.core.config import DraftSection, KvSection, ModelSection, TargetSection
from cluster.core.drafting import DraftBudget, DraftRow, Proposal
from cluster.core.errors import ConfigurationError
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, ROOT, TokenTree
from cluster.core.verification import RowFaultCode
from tests.support import tiny, tiny_tokenizer
from workers.draft.expansion.drafter import GrowingDrafter
from workers.draft.expansion.model_expander import ModelExpander
from workers.draft.expansion.settings import ExpansionSettings
from workers.draft.registry import create
from workers.forward.loaded_model import LoadedModel
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling.context import DecisionContext
from workers.sampling.decide import decide
from workers.serve.configuration import load_configuration

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)
PENALISED = SamplingParameters(
    temperature=0.8, top_k=40, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4
)
PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)
CONTEXT = 48
BLOCK = 4
BUDGET = DraftBudget(8, 8)

Mode = Literal["serial", "run_ahead", "enumerate"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("draft"), tiny.llama(max_position_embeddings=CONTEXT))


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(ModelSection(path=str(directory), device="cpu"))


class Plain:
    """The same weights, asked for one token at a time by `transformers` alone."""

    def __init__(self, directory: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._known: dict[tuple[object, ...], int] = {}

    def continued(self, tokens: Sequence[int], count: int, sampling: SamplingParameters, prompt_len: int) -> list[int]:
        found = list(tokens)
        for _ in range(count):
            key = (tuple(found), sampling, prompt_len)
            if key not in self._known:
                with torch.inference_mode():
                    logits = self._model(torch.tensor([found])).logits[0, -1:]  # [1, vocabulary]
                self._known[key] = decide(logits, [DecisionContext(sampling, found, prompt_len)])[0]
            found.append(self._known[key])
        return found[len(tokens) :]


@pytest.fixture(scope="module")
def plain(directory: Path) -> Plain:
    return Plain(directory)


class Bench:
    """A drafter, its pool, and the forward passes that it has made."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: int = 100,
        most_forward_tokens: int = 64,
        candidates: int = 1,
        mode: Mode = "serial",
    ) -> None:
        self.pool = KvPool(loaded.kv_spec, KvSection(block_size=BLOCK), blocks=blocks, truncatable=True)
        settings, draft = ExpansionSettings(mode=mode), DraftSection(max_nodes=16, max_depth=16)
        self.expander = ModelExpander(loaded, self.pool, candidates)
        self.drafter = GrowingDrafter(
            self.expander, settings, draft, most_forward_tokens=most_forward_tokens, clock=lambda: 0.0
        )
        self.widths: list[list[int]] = []
        """Tokens of each row in each forward pass."""
        runner = self.expander._runner
        forward = runner.forward

        def counted(rows):
            self.widths.append([len(row.tokens) for row in rows])
            return forward(rows)

        runner.forward = counted

    def propose(self, *rows: DraftRow) -> tuple[Proposal, ...]:
        self.widths.clear()
        return self.drafter.propose(rows)

    @property
    def blocks_held(self) -> int:
        return self.pool.blocks_total - self.pool.blocks_free


@pytest.fixture
def bench(loaded: LoadedModel) -> Iterator[Bench]:
    made = Bench(loaded)
    yield made
    made.drafter.close()
    assert made.blocks_held == 0


def first(
    tokens: Sequence[int],
    name: str = "a",
    sampling: SamplingParameters = GREEDY,
    budget: DraftBudget = BUDGET,
    prompt_len: int | None = None,
) -> DraftRow:
    start = SequenceStart(prompt_len or len(tokens), sampling)
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens), budget, start)


def further(tokens: Sequence[int], new: int, name: str = "a", budget: DraftBudget = BUDGET) -> DraftRow:
    return DraftRow(SequenceId(name), len(tokens), tuple(tokens[len(tokens) - new :]), budget)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_draft_with_the_targets_weights_agrees_everywhere(
    bench: Bench, plain: Plain, sampling: SamplingParameters
) -> None:
    answer = plain.continued(PROMPT, 30, sampling, len(PROMPT))
    tokens = list(PROMPT)
    row = first(tokens, sampling=sampling)
    while len(tokens) + BUDGET.max_nodes < len(PROMPT) + len(answer):
        guessed = bench.propose(row)[0].tree
        begun = len(tokens) - len(PROMPT)
        assert guessed == TokenTree.chain(answer[begun : begun + BUDGET.max_nodes])
        committed = answer[begun : begun + len(guessed) + 1]  # all accepted, and the bonus token
        tokens += committed
        row = further(tokens, len(committed))


MODES: tuple[Mode, ...] = ("serial", "run_ahead", "enumerate")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_tree_of_the_targets_own_weights_is_right_at_every_depth_in_every_mode(
    loaded: LoadedModel, plain: Plain, sampling: SamplingParameters, mode: Mode
) -> None:
    answer = plain.continued(PROMPT, 30, sampling, len(PROMPT))
    bench = Bench(loaded, candidates=3, mode=mode)
    tokens, taken = list(PROMPT), [1, 4, 0, 3, 2]
    row = first(tokens, sampling=sampling, budget=DraftBudget(16, 5))
    ready = 0
    for accepted in taken:
        proposal = bench.propose(row)[0]
        tree, ready = proposal.tree, ready + proposal.ready
        begun = len(tokens) - len(PROMPT)
        node, depth = ROOT, 0
        while node in tree.parents:  # not a leaf: what the target decides here is among its children
            child = tree.child(node, answer[begun + depth])
            assert child is not None
            node, depth = child, depth + 1
        assert depth > 0
        committed = answer[begun : begun + accepted + 1]
        tokens += committed
        row = further(tokens, len(committed), budget=DraftBudget(16, 5))
        while bench.drafter.grow():
            pass
    assert ready > 0 or mode == "serial"
    bench.drafter.close()
    assert bench.blocks_held == 0


def test_siblings_read_their_own_branches(loaded: LoadedModel, plain: Plain) -> None:
    """Every node's guesses are those that the model makes after the path to it, whoever wrote into the shared block."""
    bench = Bench(loaded, candidates=3, mode="enumerate")
    bench.propose(first(PROMPT, budget=DraftBudget(16, 4)))
    for _ in range(6):
        bench.drafter.grow()
    (session,) = bench.drafter._sessions.least_recent()
    expanded = [node for node in session.tree.nodes if node.children]
    assert len({id(node.branch) for node in expanded}) > 2
    for node in expanded:
        assert node.branch is not None
        path = node.branch.tokens[: node.length]
        assert [node.children[0].token] == plain.continued(path, 1, GREEDY, len(PROMPT))


def test_stored_survivors_of_a_commit_do_not_go_through_again(loaded: LoadedModel) -> None:
    bench = Bench(loaded, candidates=3, mode="enumerate")
    sent = bench.propose(first(PROMPT))[0].tree
    while bench.drafter.grow():
        pass
    second = next(node for node in range(1, 8) if sent.parents[node] == ROOT)  # the likeliest correction
    after = bench.propose(further([*PROMPT, sent.tokens[second]], 1, budget=DraftBudget(3, 1)))[0]
    assert (len(after.tree), after.ready) == (3, 3)
    assert bench.widths == []


def test_penalties_count_the_answer_alone(bench: Bench, plain: Plain) -> None:
    tokens = (*PROMPT, 3, 3, 12)
    guessed = bench.propose(first(tokens, sampling=PENALISED, prompt_len=len(PROMPT)))[0].tree
    assert guessed == TokenTree.chain(plain.continued(tokens, 8, PENALISED, len(PROMPT)))


def test_after_a_rejection_only_what_was_right_is_kept(bench: Bench, plain: Plain) -> None:
    guessed = bench.propose(first(PROMPT))[0].tree
    tokens = [*PROMPT, *guessed.tokens[:3], (guessed.tokens[3] + 1) % tiny.VOCABULARY]
    corrected = bench.propose(further(tokens, 4))[0].tree
    assert corrected == TokenTree.chain(plain.continued(tokens, 8, GREEDY, len(PROMPT)))
    assert bench.widths[0] == [1]  # three accepted guesses were stored already


def test_after_full_acceptance_the_last_guess_and_the_bonus_token_go_through(bench: Bench) -> None:
    guessed = bench.propose(first(PROMPT))[0].tree
    bench.propose(further([*PROMPT, *guessed.tokens, 7], 9))
    assert bench.widths == [[2], *[[1]] * 7]


def test_a_repeated_row_repeats_its_proposal(bench: Bench) -> None:
    row = first(PROMPT, sampling=SAMPLED)
    before = bench.propose(row)[0]
    again = bench.propose(row)[0]
    assert (again.tree, again.probabilities) == (before.tree, before.probabilities)
    assert (before.ready, again.ready) == (0, 8)
    assert bench.widths == []  # nothing was computed again


def test_rows_of_different_lengths_and_parameters_do_not_touch_each_other(bench: Bench, plain: Plain) -> None:
    rows = [
        first(PROMPT, "a", GREEDY, DraftBudget(5, 8)),
        first(PROMPT[:3], "b", SAMPLED, DraftBudget(8, 2)),
        first(PROMPT[:1], "c", PENALISED, DraftBudget(0, 8)),
        first(PROMPT[2:], "d", PENALISED, DraftBudget(8, 8)),
    ]
    wanted = [5, 2, 0, 8]
    proposals = bench.propose(*rows)
    for row, count, proposal in zip(rows, wanted, proposals, strict=True):
        assert row.start is not None
        expected = plain.continued(row.new_tokens, count, row.start.sampling, row.start.prompt_len)
        assert (proposal.sequence_id, proposal.base_len) == (row.sequence_id, row.base_len)
        assert proposal.tree == TokenTree.chain(expected)
    assert len(bench.widths) == 8  # one forward pass per depth, for all rows together


def test_long_prompts_go_in_chunks_beside_the_guesses_of_others(loaded: LoadedModel, plain: Plain) -> None:
    bench = Bench(loaded, most_forward_tokens=6)
    proposals = bench.propose(first(PROMPT * 4, "long"), first(PROMPT[:2], "short"))
    assert max(sum(widths) for widths in bench.widths) <= 6
    assert bench.widths[:2] == [[2, 4], [1, 5]]
    assert proposals[0].tree == TokenTree.chain(plain.continued(PROMPT * 4, 8, GREEDY, 32))
    assert proposals[1].tree == TokenTree.chain(plain.continued(PROMPT[:2], 8, GREEDY, 2))


def test_a_budget_of_nothing_only_commits(bench: Bench, plain: Plain) -> None:
    assert bench.propose(first(PROMPT, budget=DraftBudget(0, 0)))[0].tree == EMPTY_TREE
    assert bench.widths == []
    tokens = (*PROMPT, 4)
    assert bench.propose(further(tokens, 1))[0].tree == TokenTree.chain(plain.continued(tokens, 8, GREEDY, 8))


@pytest.mark.parametrize(("length", "guesses"), [(CONTEXT - 2, 3), (CONTEXT, 1), (CONTEXT + 1, 0), (CONTEXT + 9, 0)])
def test_guessing_ends_with_the_drafts_own_context(bench: Bench, length: int, guesses: int) -> None:
    tokens = [3 + position % 50 for position in range(length)]
    proposal = bench.propose(first(tokens))[0]
    assert proposal.fault is None
    assert len(proposal.tree) == guesses


def test_a_token_outside_the_vocabulary_faults_its_own_row_alone(bench: Bench, plain: Plain) -> None:
    wrong, fine = bench.propose(first((1, tiny.VOCABULARY), "wrong"), first(PROMPT, "fine"))
    assert wrong.fault is not None and wrong.fault.code is RowFaultCode.INVALID
    assert fine.tree == TokenTree.chain(plain.continued(PROMPT, 8, GREEDY, 8))


def test_a_row_that_is_out_of_sync_faults_alone(bench: Bench) -> None:
    lost, fine = bench.propose(further((*PROMPT, 1), 1, "lost"), first(PROMPT, "fine"))
    assert lost.fault is not None and lost.fault.code is RowFaultCode.OUT_OF_SYNC
    assert len(fine.tree) == 8


def test_when_the_pool_is_full_idle_sequences_lose_their_keys_but_not_their_tokens(
    loaded: LoadedModel, plain: Plain
) -> None:
    bench = Bench(loaded, blocks=8)  # room for two sequences of 15 tokens
    for name in "abc":
        assert len(bench.propose(first(PROMPT, name))[0].tree) == 8
    tokens = (*PROMPT, 4)
    assert bench.propose(further(tokens, 1, "c"))[0].fault is None
    assert bench.widths[0] == [1]  # the latest one is still held
    again = bench.propose(further(tokens, 1, "a"))[0]
    assert again.tree == TokenTree.chain(plain.continued(tokens, 8, GREEDY, 8))
    assert bench.widths[0] == [9]  # the oldest one was computed anew


def test_a_row_for_which_there_is_no_room_gets_an_empty_tree_and_the_others_theirs(
    loaded: LoadedModel, plain: Plain
) -> None:
    bench = Bench(loaded, blocks=5)
    huge, small = bench.propose(first(PROMPT * 4, "huge"), first(PROMPT, "small"))
    assert huge == Proposal(SequenceId("huge"), 32, EMPTY_TREE)
    assert small.tree == TokenTree.chain(plain.continued(PROMPT, 8, GREEDY, 8))


def test_a_row_without_room_leaves_what_it_held_to_the_rows_beside_it(loaded: LoadedModel) -> None:
    bench = Bench(loaded, blocks=6)
    bench.propose(first(PROMPT, "grown"))
    grown = (*PROMPT, *(4 + step for step in range(16)))
    starved, fed = bench.propose(further(grown, 16, "grown"), first(PROMPT * 2, "fed"))
    assert (len(starved.tree), len(fed.tree)) == (0, 8)


def test_logits_without_a_number_end_their_own_chain_alone(
    bench: Bench, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = bench.expander._runner.forward

    def spoilt(rows):
        logits = forward(rows).clone()
        if len(bench.widths) == 3:
            logits[0] = float("nan")
        return logits

    monkeypatch.setattr(bench.expander._runner, "forward", spoilt)
    broken, fine = bench.propose(first(PROMPT, "broken"), first(PROMPT, "fine"))
    expected = plain.continued(PROMPT, 8, GREEDY, 8)
    assert broken.tree == TokenTree.chain(expected[:2])
    assert fine.tree == TokenTree.chain(expected)


def test_a_forward_pass_that_fails_leaves_nothing_behind_that_the_next_would_trip_over(
    bench: Bench, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(rows):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(bench.expander._runner, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            bench.propose(first(PROMPT))
    assert bench.blocks_held == 0
    tokens = (*PROMPT, 4)
    assert bench.propose(further(tokens, 1))[0].tree == TokenTree.chain(plain.continued(tokens, 8, GREEDY, 8))


def test_a_draft_with_a_window_goes_back_behind_it(tmp_path: Path) -> None:
    directory = tiny.save(tmp_path, tiny.mistral(sliding_window=6))
    plain = Plain(directory)
    bench = Bench(load_model(ModelSection(path=str(directory), device="cpu")))
    tokens = list(PROMPT * 3)
    assert bench.propose(first(tokens))[0].tree == TokenTree.chain(plain.continued(tokens, 8, GREEDY, 24))
    shorter = [*tokens[:9], 3]
    assert bench.propose(first(shorter))[0].tree == TokenTree.chain(plain.continued(shorter, 8, GREEDY, 10))
    assert bench.widths[0] == [1]


def test_a_released_sequence_frees_its_blocks(bench: Bench) -> None:
    bench.propose(first(PROMPT))
    assert bench.blocks_held == 4
    bench.drafter.release([SequenceId("a"), SequenceId("unknown")])
    assert bench.blocks_held == 0


names = st.sampled_from("abc")
sides = st.tuples(names, st.integers(0, 9), st.lists(st.integers(0, 95), min_size=1, max_size=3), st.integers(0, 4))


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(sides, min_size=1, max_size=3, unique_by=lambda side: side[0]), min_size=1, max_size=6))
def test_whatever_was_accepted_rejected_rewound_or_pushed_out_every_guess_is_the_models_own(
    loaded: LoadedModel, plain: Plain, rounds: list[list[tuple[str, int, list[int], int]]]
) -> None:
    bench = Bench(loaded, blocks=9, most_forward_tokens=7)
    committed = {name: list(PROMPT[: 2 + place]) for place, name in enumerate("abc")}
    guessed: dict[str, tuple[int, ...]] = dict.fromkeys("abc", ())
    told: set[str] = set()
    for sides_taken in rounds:
        rows = []
        for name, accepted, own, rewound in sides_taken:
            known_len = max(1, len(committed[name]) - rewound)
            kept = [*committed[name], *guessed[name][:accepted]] if rewound == 0 else committed[name][:known_len]
            committed[name] = [*kept, *own][:40]
            budget = DraftBudget(4, 4)
            row = further(committed[name], len(committed[name]) - known_len, name, budget)
            rows.append(row if name in told else first(committed[name], name, SAMPLED, budget, prompt_len=2))
            told.add(name)
        for (name, *_), proposal in zip(sides_taken, bench.propose(*rows), strict=True):
            assert proposal.fault is None
            guessed[name] = proposal.tree.tokens
            expected = plain.continued(committed[name], 4, SAMPLED, 2)
            assert list(guessed[name]) in ([], expected)  # empty where the pool has no room
    bench.drafter.close()
    assert bench.blocks_held == 0


def drafted_by(directory: Path, **settings: object) -> DraftSection:
    model = {"path": str(directory), "device": "cpu"} | settings
    return load_configuration({"draft": {"method": "model", "model": model}}).draft


def test_a_draft_that_only_pads_its_embeddings_differently_is_taken(tmp_path: Path) -> None:
    target = tiny.save(tmp_path / "target", tiny.llama(vocab_size=320))
    draft = tiny.save(tmp_path / "draft", tiny.llama(vocab_size=352), seed=1)
    for directory in (target, draft):
        tiny_tokenizer.byte_level(directory)
    create(drafted_by(draft), TargetSection(path=str(target), device="cpu")).close()


def test_a_draft_with_another_vocabulary_is_refused_with_both_sizes(directory: Path, tmp_path: Path) -> None:
    target = tiny.save(tmp_path, tiny.llama(vocab_size=100))
    with pytest.raises(ConfigurationError, match=r"96 tokens and the target .* one of 100"):
        create(drafted_by(directory), TargetSection(path=str(target)))


def test_the_method_is_made_from_its_configuration(directory: Path, plain: Plain) -> None:
    section = drafted_by(directory, kv={"pool_bytes": 1 << 20}, candidates=1)
    method = create(section, TargetSection(path=str(directory)))
    assert method.propose([first(PROMPT)])[0].tree == TokenTree.chain(plain.continued(PROMPT, 8, GREEDY, 8))
    method.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_draft_on_a_gpu_guesses_what_it_guesses_on_a_cpu(
    directory: Path, plain: Plain, sampling: SamplingParameters
) -> None:
    bench = Bench(load_model(ModelSection(path=str(directory), device="cuda")))
    guessed = bench.propose(first(PROMPT, sampling=sampling))[0].tree
    assert guessed == TokenTree.chain(plain.continued(PROMPT, 8, sampling, len(PROMPT)))
