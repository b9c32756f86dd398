"""The target's step: what it decides, what it keeps, and what it refuses without harm to others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config import KvSection, ModelSection
from cluster.core.errors import InvalidRequest
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import OpenRow, RowFaultCode, StepBatch, Verdict, VerifyRow
from tests.support import tiny
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine

Guess = Callable[[Sequence[int]], TokenTree]
GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)
PENALISED = SamplingParameters(
    temperature=0.8, top_k=40, seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


def open_engine(directory: Path, blocks: int = 200) -> TargetEngine:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    return TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=blocks), LocalDecider())


@pytest.fixture
def engine(directory: Path) -> TargetEngine:
    return open_engine(directory)


def first_row(name: str, prompt: Sequence[int], sampling: SamplingParameters = GREEDY) -> VerifyRow:
    return VerifyRow(SequenceId(name), len(prompt), tuple(prompt), start=SequenceStart(len(prompt), sampling))


def open_row(name: str, tokens: Sequence[int], parent: str | None = None, salt: str = "") -> OpenRow:
    start = SequenceStart(1, GREEDY, salt)
    return OpenRow(SequenceId(name), tuple(tokens), start, None if parent is None else SequenceId(parent))


def one(engine: TargetEngine, row: VerifyRow) -> Verdict:
    return engine.step(StepBatch((row,))).verdicts[0]


def decode(
    engine: TargetEngine,
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParameters = GREEDY,
    guess: Guess = lambda _: EMPTY_TREE,
) -> list[int]:
    tokens = list(prompt)
    verdict = one(engine, first_row("a", prompt, sampling))
    while True:
        assert verdict.fault is None
        tokens.extend(verdict.tokens)
        if len(tokens) >= len(prompt) + count:
            break
        verdict = one(engine, VerifyRow(SequenceId("a"), len(tokens), (tokens[-1],), guess(tokens)))
    engine.release([SequenceId("a")])
    return tokens[len(prompt) : len(prompt) + count]


def reference(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    output = model.generate(
        torch.tensor([list(prompt)]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return output[0, len(prompt) :].tolist()


PROMPT = (5, 17, 33, 8, 60, 41, 41, 9)


def test_greedy_decoding_is_the_models_own(engine: TargetEngine, directory: Path) -> None:
    assert decode(engine, PROMPT, 40) == reference(directory, PROMPT, 40)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_no_drafter_changes_the_text(engine: TargetEngine, sampling: SamplingParameters) -> None:
    plain = decode(engine, PROMPT, 60, sampling)
    complete = [*PROMPT, *plain, *range(10)]
    draw = random.Random(0)

    def right(tokens: Sequence[int]) -> TokenTree:
        return TokenTree.chain(complete[len(tokens) : len(tokens) + 5])

    def wrong(tokens: Sequence[int]) -> TokenTree:
        return TokenTree.chain((token + 1) % tiny.VOCABULARY for token in right(tokens).tokens)

    def mixed(tokens: Sequence[int]) -> TokenTree:
        true = right(tokens).tokens
        candidates = [[draw.randrange(tiny.VOCABULARY) for _ in range(4)], true[: draw.randrange(6)], (*true[:2], 3, 4)]
        draw.shuffle(candidates)
        return TokenTree.from_candidates(candidates, max_nodes=12)

    for guess in (right, wrong, mixed):
        assert decode(engine, PROMPT, 60, sampling, guess) == plain
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_right_chain_is_accepted_whole_with_a_bonus_token(engine: TargetEngine) -> None:
    plain = decode(engine, PROMPT, 8)
    one(engine, first_row("a", PROMPT))
    row = VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), TokenTree.chain(plain[1:6]))
    verdict = one(engine, row)
    assert verdict.tokens == tuple(plain[1:7])
    assert (verdict.accepted, verdict.drafted) == (5, 5)


def test_rejected_nodes_leave_no_block_behind(engine: TargetEngine) -> None:
    plain = decode(engine, PROMPT, 2)
    one(engine, first_row("a", PROMPT))
    free = engine.info().kv.blocks_free
    wrong = TokenTree.chain((token + 1) % tiny.VOCABULARY for token in range(40, 70))
    result = engine.step(StepBatch((VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), wrong),)))
    assert result.verdicts[0].tokens == (plain[1],)
    assert result.kv.blocks_free >= free - 1


def test_a_repeated_row_repeats_its_verdict(engine: TargetEngine) -> None:
    prompt = first_row("a", PROMPT)
    first = one(engine, prompt)
    assert one(engine, prompt) == first
    row = VerifyRow(SequenceId("a"), len(PROMPT) + 1, first.tokens, TokenTree.chain((4, 5)))
    assert one(engine, row) == one(engine, row)


def test_a_row_that_builds_on_unknown_tokens_says_what_is_held(engine: TargetEngine) -> None:
    unknown = one(engine, VerifyRow(SequenceId("a"), 9, (1,)))
    assert unknown.fault is not None
    assert (unknown.fault.code, unknown.fault.stored_len) == (RowFaultCode.OUT_OF_SYNC, 0)
    one(engine, first_row("a", PROMPT))
    ahead = one(engine, VerifyRow(SequenceId("a"), 20, (1, 2)))
    assert ahead.fault is not None
    assert (ahead.fault.code, ahead.fault.stored_len) == (RowFaultCode.OUT_OF_SYNC, len(PROMPT))


def test_a_sequence_sent_from_the_start_again_goes_on_as_before(engine: TargetEngine, directory: Path) -> None:
    plain = decode(engine, PROMPT, 20, SAMPLED)
    restarted = open_engine(directory)
    known = (*PROMPT, *plain[:9])
    verdict = one(restarted, VerifyRow(SequenceId("a"), len(known), known, start=SequenceStart(len(PROMPT), SAMPLED)))
    assert verdict.tokens == (plain[9],)


def test_a_prompt_in_chunks_decides_only_at_its_end(engine: TargetEngine) -> None:
    whole = one(engine, first_row("whole", PROMPT))
    start = SequenceStart(len(PROMPT), GREEDY)
    early = one(engine, VerifyRow(SequenceId("a"), 5, PROMPT[:5], decide=False, start=start))
    assert early.tokens == ()
    assert one(engine, VerifyRow(SequenceId("a"), len(PROMPT), PROMPT[5:])).tokens == whole.tokens


def test_one_row_out_of_memory_does_not_stop_the_others(directory: Path) -> None:
    engine = open_engine(directory, blocks=6)
    long = first_row("long", [3] * 100)
    verdicts = engine.step(StepBatch((first_row("a", PROMPT), long))).verdicts
    assert verdicts[0].fault is None
    assert verdicts[1].fault is not None
    assert verdicts[1].fault.code is RowFaultCode.KV_EXHAUSTED
    engine.release([SequenceId("a"), SequenceId("long")])
    assert engine.info().kv.blocks_free == 6


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (first_row("bad", (5, tiny.VOCABULARY)), "pending: token 96 must be below the vocabulary size 96"),
        (
            VerifyRow(SequenceId("bad"), 2, (5, 6), TokenTree.chain((99,)), start=SequenceStart(2, GREEDY)),
            "tree.tokens: token 99 must be below",
        ),
        (first_row("bad", [5] * 257), "beyond the context of 256 tokens"),
        (VerifyRow(SequenceId("bad"), 1, ()), "pending: it must hold at least one token"),
        (
            VerifyRow(SequenceId("bad"), 1, (4,), TokenTree.chain((5,)), False, SequenceStart(1, GREEDY)),
            "tree: it must be empty where nothing is decided",
        ),
    ],
)
def test_a_bad_row_faults_alone(engine: TargetEngine, row: VerifyRow, message: str) -> None:
    good = one(engine, first_row("alone", PROMPT))
    bad, beside = engine.step(StepBatch((row, first_row("a", PROMPT)))).verdicts
    assert bad.fault is not None
    assert bad.fault.code is RowFaultCode.INVALID
    assert message in bad.fault.message
    assert beside.tokens == good.tokens


def test_two_rows_of_one_sequence_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="in one row only"):
        StepBatch((first_row("a", PROMPT), first_row("a", PROMPT)))


def test_logits_without_a_number_fail_their_own_request(engine: TargetEngine, directory: Path) -> None:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[50] = float("nan")
    poisoned = TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=50), LocalDecider())
    bad, good = poisoned.step(StepBatch((first_row("bad", (5, 50)), first_row("good", PROMPT)))).verdicts
    assert bad.fault is not None
    assert bad.fault.code is RowFaultCode.INVALID
    assert good.tokens == one(engine, first_row("good", PROMPT)).tokens


def test_what_is_no_number_does_not_outlive_its_sequence(directory: Path) -> None:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    with torch.no_grad():
        model.module.get_input_embeddings().weight[50] = float("nan")
    poisoned = TargetEngine(model, KvPool(model.kv_spec, KvSection(block_size=4), blocks=8), LocalDecider())
    healthy = one(open_engine(directory), first_row("a", PROMPT)).tokens
    bad = one(poisoned, first_row("bad", [5, 7, 9, 50] * 8))
    assert bad.fault is not None
    poisoned.release([SequenceId("bad")])
    for length in (len(PROMPT), 5, 1):  # blocks used before, whole and in part, alone and as padding
        row = first_row("a", PROMPT[:length])
        assert one(poisoned, row).fault is None
    assert one(poisoned, first_row("b", PROMPT)).tokens == healthy


def test_children_share_the_prompt_and_go_their_own_ways(engine: TargetEngine) -> None:
    one(engine, first_row("parent", PROMPT))
    free = engine.info().kv.blocks_free
    children = [("left", (*PROMPT, 20)), ("right", (*PROMPT, 30))]
    opened = engine.open([open_row(name, tokens, parent="parent") for name, tokens in children])
    assert opened.stored_lens == (len(PROMPT), len(PROMPT))
    assert opened.kv.blocks_free == free
    rows = [VerifyRow(SequenceId(name), len(tokens), tokens[-1:]) for name, tokens in children]
    for (_, tokens), verdict in zip(children, engine.step(StepBatch(tuple(rows))).verdicts, strict=True):
        assert verdict.tokens == one(engine, first_row("fresh", tokens)).tokens
    engine.release([SequenceId(name) for name in ("parent", "left", "right", "fresh")])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_child_shares_its_parents_half_filled_block_and_leaves_out_its_own_last_token(engine: TargetEngine) -> None:
    one(engine, first_row("parent", (*PROMPT, 7, 7)))
    opened = engine.open(
        [
            open_row("further", (*PROMPT, 7, 7, 8), parent="parent"),
            open_row("same", (*PROMPT, 7, 7), parent="parent"),
            open_row("apart", (*PROMPT[:6], 1, 1), parent="parent"),
        ]
    )
    assert opened.stored_lens == (10, 9, 6)


def test_a_repeated_open_opens_the_same(engine: TargetEngine) -> None:
    one(engine, first_row("parent", PROMPT))
    row = open_row("child", (*PROMPT, 20), parent="parent")
    first = engine.open([row])
    assert engine.open([row]) == first
    one(engine, VerifyRow(SequenceId("child"), len(PROMPT) + 1, (20,)))
    assert engine.open([row]).stored_lens == first.stored_lens  # anew, whatever it has become


def test_a_sequence_that_is_opened_anew_begins_with_what_it_holds(engine: TargetEngine) -> None:
    verdict = one(engine, first_row("a", (*PROMPT, 7)))
    opened = engine.open([open_row("a", (*PROMPT, 7, *verdict.tokens), parent="long gone")])
    assert opened.stored_lens == (len(PROMPT) + 1,)


def test_releasing_all_frees_what_nobody_names(engine: TargetEngine) -> None:
    one(engine, first_row("a", PROMPT))
    one(engine, first_row("b", PROMPT))
    kv = engine.release_all()
    assert kv.blocks_free == kv.blocks_total


def test_logprobs_are_the_models_own_at_every_accepted_token(engine: TargetEngine, directory: Path) -> None:
    sampling = SamplingParameters(temperature=0.7, seed=5, logprobs=3, top_k=10)
    plain = decode(engine, PROMPT, 6, sampling)
    one(engine, first_row("a", PROMPT, sampling))
    tree = TokenTree.from_candidates([[1, 2], plain[1:4]], max_nodes=8)
    verdict = one(engine, VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), tree))
    assert verdict.tokens == tuple(plain[1:5])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([[*PROMPT, *plain]])).logits[0].log_softmax(-1)
    for offset, entry in enumerate(verdict.logprobs):
        row = expected[len(PROMPT) + offset]
        assert entry.token == plain[offset + 1]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_random_lives_leak_nothing(directory: Path) -> None:
    engine = open_engine(directory, blocks=40)
    draw = random.Random(1)
    held: dict[str, list[int]] = {}
    for turn in range(200):
        action = draw.random()
        name = draw.choice(sorted(held)) if held else ""
        if action < 0.25 or not held:
            name = f"s{turn}"
            prompt = [draw.randrange(tiny.VOCABULARY) for _ in range(draw.randrange(1, 30))]
            verdict = one(engine, first_row(name, prompt, SAMPLED))
            if verdict.fault is None:
                held[name] = [*prompt, *verdict.tokens]
        elif action < 0.75:
            tokens = held[name]
            guesses = [[draw.randrange(tiny.VOCABULARY) for _ in range(3)] for _ in range(draw.randrange(4))]
            tree = TokenTree.from_candidates(guesses, 8)
            verdict = one(engine, VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), tree))
            tokens.extend(verdict.tokens)
        elif action < 0.85:
            engine.open([open_row(f"f{turn}", held[name], parent=name)])
            held[f"f{turn}"] = list(held[name])
        else:
            engine.release([SequenceId(name), SequenceId(name)])
            del held[name]
        if any(len(tokens) > 240 for tokens in held.values()):
            break
    engine.release([SequenceId(name) for name in held])
    assert engine.info().kv.blocks_free == 40
