"""What a decoder-only target does with parameters, ends and rejected drafts, with every encoder-decoder family."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from cluster.core.drafting import RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import VerifyRow
from tests.support.engines.engine_rows import verify
from tests.support.engines.engine_sequence import GREEDY, BothTexts, drafts_near, some_tokens
from tests.support.engines.sourced import SAMPLED, SOURCE, SourcedModel, sourced, translate
from tests.support.models import tiny
from tests.unit.verify.test_excluded_tokens import contains
from workers.verify.engine import TargetEngine

PENALISED = SamplingParameters(
    temperature=0.8, top_k=40, seed=3, repetition_penalty=1.8, presence_penalty=1.5, frequency_penalty=1.3
)
COUNT = 30


@pytest.fixture(scope="module")
def engine(model: SourcedModel) -> TargetEngine:
    return model.engine()


def first_row(engine: TargetEngine, drafted: Sequence[int] = (), **parameters: object) -> VerifyRow:
    """The decoder's start with a chain of drafted tokens."""
    sequence = sourced(engine, sampling=replace(GREEDY, **parameters))  # type: ignore[arg-type]
    tree = TokenTree.chain(drafted)
    return VerifyRow(sequence.name, len(sequence.tokens), tuple(sequence.tokens), tree, start=sequence.start)


def test_penalties_are_the_same_with_drafts(engine: TargetEngine) -> None:
    plain = translate(engine, 2 * COUNT, sampling=PENALISED)
    assert plain != translate(engine, 2 * COUNT, sampling=SamplingParameters(temperature=0.8, top_k=40, seed=3))
    drafts = drafts_near([*engine.info().decoder_start, *plain])
    assert translate(engine, 2 * COUNT, sampling=PENALISED, propose=drafts) == plain


def test_logprobs_are_the_models_own_at_every_accepted_token(model: SourcedModel, engine: TargetEngine) -> None:
    sampling = SamplingParameters(temperature=0.7, seed=5, logprobs=3, top_k=10)
    plain = translate(engine, 6, sampling=sampling)
    row = first_row(engine, (), temperature=0.7, seed=5, logprobs=3, top_k=10)
    tree = TokenTree.from_candidates([[1, 2], plain[:4]], max_nodes=8)
    verdict = verify(engine, replace(row, tree=tree))
    engine.release([row.sequence_id])
    assert verdict.tokens == tuple(plain[:5])
    start = engine.info().decoder_start
    written = torch.tensor([[*start, *plain]])
    with torch.inference_mode():
        logits = model.reference()(input_ids=torch.tensor([SOURCE]), decoder_input_ids=written).logits[0]
    expected = logits.log_softmax(-1)
    for offset, entry in enumerate(verdict.logprobs):
        found = expected[len(start) - 1 + offset]
        assert entry.token == plain[offset]
        assert entry.logprob == pytest.approx(float(found[entry.token]), abs=1e-3)
        assert [token for token, _ in entry.top] == found.topk(3).indices.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["allowed", "bad words", "minimal length"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_excluded_tokens_never_occur_and_no_draft_changes_the_text(
    engine: TargetEngine, kind: str, sampling: SamplingParameters
) -> None:
    free = translate(engine, COUNT, sampling=sampling)
    forbidden = engine.info().bad_words
    restricted: dict[str, Any] = {
        "allowed": {"allowed_token_ids": tuple(range(1, tiny.VOCABULARY, 3))},
        "bad words": {"bad_words": (*forbidden, (free[0],), tuple(free[3:5]))},
        "minimal length": {"end_token_ids": tuple(free[2:9]), "min_tokens": COUNT},
    }[kind]
    parameters = replace(sampling, **restricted)
    start = engine.info().decoder_start
    sequence = sourced(engine, sampling=parameters)
    sequence.start = replace(sequence.start, sampling=replace(parameters, bad_words=parameters.bad_words or forbidden))
    sequence.open()
    plain = sequence.decode(COUNT)
    engine.release([sequence.name])
    assert plain != free
    if parameters.allowed_token_ids:
        assert set(plain) <= set(parameters.allowed_token_ids)
    assert not any(contains(plain, word) for word in sequence.start.sampling.bad_words)
    assert not set(plain) & set(parameters.end_token_ids)
    drafts = BothTexts([*start, *plain], [*start, *free])
    del sequence.tokens[len(start) :]
    sequence.open()
    assert sequence.decode(COUNT, drafts) == plain
    engine.release([sequence.name])
    assert drafts.steps < COUNT / 2  # drafts were accepted


@pytest.mark.parametrize("ends_after", [1, 4, 9])
def test_a_block_is_accepted_up_to_the_first_end_token(engine: TargetEngine, ends_after: int) -> None:
    answer = translate(engine, 11)
    end = answer[ends_after - 1]
    length = answer.index(end) + 1
    row = first_row(engine, answer[:10], end_token_ids=(end,))
    found = verify(engine, row)
    engine.release([row.sequence_id])
    assert list(found.tokens) == answer[:length]
    assert found.accepted == length - 1


def test_a_repeated_row_repeats_its_verdict_and_one_out_of_sync_is_a_fault(engine: TargetEngine) -> None:
    row = first_row(engine)
    first = verify(engine, row)
    assert verify(engine, row) == first
    later = VerifyRow(row.sequence_id, row.base_len + 1, first.tokens, TokenTree.chain((4, 5)))
    assert verify(engine, later) == verify(engine, later)
    ahead = verify(engine, VerifyRow(row.sequence_id, 40, (1, 2))).fault
    assert ahead is not None and ahead.code is RowFaultCode.OUT_OF_SYNC
    engine.release([row.sequence_id])


def test_random_sequences_leak_no_block(model: SourcedModel) -> None:
    engine = model.engine(blocks=40)
    draw = random.Random(1)
    held: dict[str, list[int]] = {}
    faults = 0
    for index in range(80):
        action, name = draw.random(), draw.choice(sorted(held)) if held else ""
        if action < 0.3 or not held:
            sequence = sourced(engine, some_tokens(draw.randrange(1, 30), draw.randrange(4)), f"s{index}", SAMPLED)
            row = VerifyRow(sequence.name, len(sequence.tokens), tuple(sequence.tokens), start=sequence.start)
            verdict = verify(engine, row)
            if verdict.fault is None:
                held[f"s{index}"] = [*sequence.tokens, *verdict.tokens]
            faults += verdict.fault is not None
        elif action < 0.8:
            tokens = held[name]
            tree = TokenTree.from_candidates([some_tokens(3, draw.randrange(99)) for _ in range(3)], 8)
            verdict = verify(engine, VerifyRow(SequenceId(name), len(tokens), (tokens[-1],), tree))
            tokens.extend(verdict.tokens)
            faults += verdict.fault is not None
        else:
            engine.release([SequenceId(name), SequenceId(name)])
            del held[name]
    engine.release_all()
    assert faults > 0
    assert engine.info().kv.blocks_free == 40
