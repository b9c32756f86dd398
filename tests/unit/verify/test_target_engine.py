"""The target decides and reports its own tokens for any drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import (
    PROMPT,
    SAMPLED,
    decode,
    first_row,
    open_engine,
    open_row,
    reference,
    verify,
)
from tests.support.engines.engine_sequence import GREEDY
from tests.support.models import tiny
from workers.verify.engine import TargetEngine

PENALISED = SamplingParameters(
    temperature=0.8, top_k=40, seed=3, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
)


def test_greedy_decoding_is_the_models_own(engine: TargetEngine, directory: Path) -> None:
    assert decode(engine, PROMPT, 40) == reference(directory, PROMPT, 40)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_no_drafter_changes_the_text(engine: TargetEngine, sampling: SamplingParameters) -> None:
    plain = decode(engine, PROMPT, 60, sampling)
    text = [*PROMPT, *plain, *range(10)]
    draw = random.Random(0)

    def right(tokens: Sequence[int]) -> TokenTree:
        return TokenTree.chain(text[len(tokens) : len(tokens) + 5])

    def wrong(tokens: Sequence[int]) -> TokenTree:
        return TokenTree.chain((token + 1) % tiny.VOCABULARY for token in right(tokens).tokens)

    def mixed(tokens: Sequence[int]) -> TokenTree:
        true = right(tokens).tokens
        candidates = [[draw.randrange(tiny.VOCABULARY) for _ in range(4)], true[: draw.randrange(6)], (*true[:2], 3, 4)]
        draw.shuffle(candidates)
        return TokenTree.from_candidates(candidates, max_nodes=12)

    for propose in (right, wrong, mixed):
        assert decode(engine, PROMPT, 60, sampling, propose) == plain
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_correct_chain_is_accepted_completely_with_a_bonus_token(engine: TargetEngine) -> None:
    plain = decode(engine, PROMPT, 8)
    verify(engine, first_row("a", PROMPT))
    row = VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), TokenTree.chain(plain[1:6]))
    verdict = verify(engine, row)
    assert verdict.tokens == tuple(plain[1:7])
    assert (verdict.accepted, verdict.drafted) == (5, 5)


def test_rejected_nodes_free_their_blocks(engine: TargetEngine) -> None:
    plain = decode(engine, PROMPT, 2)
    verify(engine, first_row("a", PROMPT))
    free = engine.info().kv.blocks_free
    wrong = TokenTree.chain((token + 1) % tiny.VOCABULARY for token in range(40, 70))
    result = engine.step(StepBatch((VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), wrong),)))
    assert result.verdicts[0].tokens == (plain[1],)
    assert result.kv.blocks_free >= free - 1


def test_logprobs_are_the_models_own_at_every_accepted_token(engine: TargetEngine, directory: Path) -> None:
    sampling = SamplingParameters(temperature=0.7, seed=5, logprobs=3, top_k=10)
    plain = decode(engine, PROMPT, 6, sampling)
    verify(engine, first_row("a", PROMPT, sampling))
    tree = TokenTree.from_candidates([[1, 2], plain[1:4]], max_nodes=8)
    verdict = verify(engine, VerifyRow(SequenceId("a"), len(PROMPT) + 1, (plain[0],), tree))
    assert verdict.tokens == tuple(plain[1:5])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([[*PROMPT, *plain]])).logits[0].log_softmax(-1)
    for offset, entry in enumerate(verdict.logprobs):
        row = expected[len(PROMPT) + offset]
        assert entry.token == plain[offset + 1]
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-3)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_random_sequences_leak_no_block(directory: Path) -> None:
    engine = open_engine(directory, blocks=40)
    draw = random.Random(1)
    held: dict[str, list[int]] = {}
    for index in range(200):
        action = draw.random()
        name = draw.choice(sorted(held)) if held else ""
        if action < 0.25 or not held:
            name = f"s{index}"
            prompt = [draw.randrange(tiny.VOCABULARY) for _ in range(draw.randrange(1, 30))]
            verdict = verify(engine, first_row(name, prompt, SAMPLED))
            if verdict.fault is None:
                held[name] = [*prompt, *verdict.tokens]
        elif action < 0.75:
            tokens = held[name]
            drafts = [[draw.randrange(tiny.VOCABULARY) for _ in range(3)] for _ in range(draw.randrange(4))]
            tree = TokenTree.from_candidates(drafts, 8)
            verdict = verify(engine, VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), tree))
            tokens.extend(verdict.tokens)
        elif action < 0.85:
            engine.open([open_row(f"f{index}", held[name], parent=name)])
            held[f"f{index}"] = list(held[name])
        else:
            engine.release([SequenceId(name), SequenceId(name)])
            del held[name]
        if any(len(tokens) > 240 for tokens in held.values()):
            break
    engine.release([SequenceId(name) for name in held])
    assert engine.info().kv.blocks_free == 40
