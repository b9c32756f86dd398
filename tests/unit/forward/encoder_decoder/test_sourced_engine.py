"""The target writes what `transformers` writes, with every encoder-decoder family and every kind of row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from cluster.core.drafting import RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from tests.support.engines.engine_rows import verify
from tests.support.engines.engine_sequence import GREEDY, drafts_near, some_tokens
from tests.support.engines.sourced import SAMPLED, SOURCE, SourcedModel, greedy_answer, sourced, translate
from workers.verify.engine import TargetEngine

SOURCES = [SOURCE, (7,), tuple(some_tokens(31, 1)), tuple(some_tokens(12, 2)), (9, 9, 9, 9, 2)]
"""Source texts, as tokens: shorter than one block of KV memory, exactly full, and several blocks long."""


@pytest.fixture(scope="module")
def engine(model: SourcedModel) -> TargetEngine:
    return model.engine()


def test_greedy_decoding_is_that_of_transformers(model: SourcedModel, engine: TargetEngine) -> None:
    reference = model.reference()
    answers = [translate(engine, 24, source) for source in SOURCES]
    assert answers == [greedy_answer(reference, source, 24) for source in SOURCES]
    assert len({tuple(answer) for answer in answers}) > 1
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_draft_changes_the_text(engine: TargetEngine, sampling: SamplingParameters) -> None:
    plain = translate(engine, 40, sampling=sampling)
    start = list(engine.info().decoder_start)

    def right(tokens: Sequence[int]) -> TokenTree:
        return TokenTree.chain([*start, *plain][len(tokens) : len(tokens) + 5])

    for propose in (right, drafts_near([*start, *plain]), drafts_near([*start, *plain], seed=1)):
        assert translate(engine, 40, sampling=sampling, propose=propose) == plain


def test_a_correct_chain_is_accepted_whole(engine: TargetEngine) -> None:
    plain = translate(engine, 8, sampling=SAMPLED)
    sequence = sourced(engine, sampling=SAMPLED)
    sequence.open()
    row = VerifyRow(sequence.name, len(sequence.tokens), tuple(sequence.tokens), TokenTree.chain(plain[:7]))
    verdict = verify(engine, row)
    engine.release([sequence.name])
    assert (verdict.tokens, verdict.accepted) == (tuple(plain), 7)


def test_rows_of_one_step_do_not_change_each_other(engine: TargetEngine) -> None:
    draw = random.Random(3)
    alone = [translate(engine, 24, source, SAMPLED) for source in SOURCES]
    running = [sourced(engine, source, f"s{index}", SAMPLED) for index, source in enumerate(SOURCES)]
    starts = [len(one.tokens) for one in running]
    stored = [0] * len(running)
    while any(len(one.tokens) < first + 24 for one, first in zip(running, starts, strict=True)):
        rows = []
        for index, one in enumerate(running):
            true = alone[index][len(one.tokens) - starts[index] :][: draw.randrange(4)]
            tree = TokenTree.from_candidates([[*true[:1], 3], true] if true else [], max_nodes=8)
            pending = tuple(one.tokens[stored[index] :])
            rows.append(VerifyRow(one.name, len(one.tokens), pending, tree, start=None if stored[index] else one.start))
        for index, verdict in enumerate(engine.step(StepBatch(tuple(rows))).verdicts):
            assert verdict.fault is None, verdict.fault
            stored[index] = len(running[index].tokens) + verdict.accepted
            running[index].tokens.extend(verdict.tokens)
    engine.release([one.name for one in running])
    assert [one.tokens[first : first + 24] for one, first in zip(running, starts, strict=True)] == alone


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_replayed_answer_goes_on_as_before(model: SourcedModel, engine: TargetEngine, chunk: int) -> None:
    plain = translate(engine, 30, sampling=SAMPLED)
    restarted = model.engine()
    sequence = sourced(restarted, sampling=SAMPLED, answer=plain[:17])
    assert sequence.open() == 0
    sequence.chunk = chunk
    assert sequence.decode(13) == plain[17:]


def test_a_preempted_sequence_finds_its_tokens_and_its_source(model: SourcedModel) -> None:
    engine = model.engine()
    sequence = sourced(engine, sampling=SAMPLED)
    sequence.open()
    first = sequence.decode(15)
    engine.release([sequence.name])
    assert sequence.open() >= 12
    assert [*first, *sequence.decode(10)] == translate(model.engine(), 25, sampling=SAMPLED)


def test_a_fork_goes_on_like_its_parent(engine: TargetEngine) -> None:
    plain = translate(engine, 20, sampling=SAMPLED)
    parent = sourced(engine, sampling=SAMPLED)
    parent.open()
    parent.decode(7)
    fork = sourced(engine, name="fork", sampling=SAMPLED, answer=plain[:7])
    assert fork.open(parent="a") == len(fork.tokens) - 1
    assert fork.decode(13) == parent.decode(13) == plain[7:]
    engine.release([parent.name, fork.name])


def test_the_description_says_how_answers_start_and_end(engine: TargetEngine, model: SourcedModel) -> None:
    info = engine.info()
    config = model.reference().generation_config
    assert info.is_encoder_decoder
    assert info.decoder_start[0] == config.decoder_start_token_id
    assert info.decoder_start[1:] == (() if config.forced_bos_token_id is None else (config.forced_bos_token_id,))
    assert info.forced_eos_token_id == config.forced_eos_token_id
    assert info.bad_words == tuple(map(tuple, config.bad_words_ids or ()))
    assert info.max_source_len >= 256


@pytest.mark.parametrize(
    ("source", "message"),
    [((), "0 tokens"), ((3,) * 600, "600 tokens, but it must have between 1 and"), ((5, 96), "token 96 must be below")],
)
def test_a_source_that_the_model_cannot_read_is_refused(
    engine: TargetEngine, source: tuple[int, ...], message: str
) -> None:
    row = VerifyRow(SequenceId("bad"), 1, (2,), start=SequenceStart(1, GREEDY, source=source))
    verdict = verify(engine, row)
    assert verdict.fault is not None and verdict.fault.code is RowFaultCode.INVALID
    assert message in verdict.fault.message
    engine.release([row.sequence_id])


def test_a_step_that_fails_after_reading_a_source_is_repeated(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = translate(engine, 5)
    sequence = sourced(engine, (8, 8, 8))
    row = VerifyRow(sequence.name, len(sequence.tokens), tuple(sequence.tokens), start=sequence.start)
    with monkeypatch.context() as broken:
        broken.setattr(engine._runner, "forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step(StepBatch((row,)))
    assert verify(engine, row).tokens == tuple(translate(engine, 1, (8, 8, 8)))
    engine.release([sequence.name])
    assert translate(engine, 5) == plain
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_texts_on_a_gpu_are_those_of_transformers_there(model: SourcedModel) -> None:
    check_texts_on(model, "cuda")


@pytest.mark.slow
def test_texts_of_an_engine_are_those_of_transformers_on_its_device(model: SourcedModel) -> None:
    """What the test on a GPU checks, on CPU."""
    check_texts_on(model, "cpu")


def check_texts_on(model: SourcedModel, device: str) -> None:
    """Greedy and sampled texts, without drafts and with right and wrong ones, on one device."""
    engine, reference = model.engine(device=device), model.reference().to(device)
    start = list(engine.info().decoder_start)
    for source in SOURCES:
        answer = translate(engine, 24, source)
        assert answer == greedy_answer(reference, source, 24)
        assert translate(engine, 24, source, propose=drafts_near([*start, *answer])) == answer
        sampled = translate(engine, 24, source, SAMPLED)
        assert translate(engine, 24, source, SAMPLED, propose=drafts_near([*start, *sampled])) == sampled
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
