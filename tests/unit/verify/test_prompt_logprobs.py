"""Log-probabilities of the prompt are the model's own, however the prompt is divided into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart, TokenLogprobs
from cluster.core.verification import OpenRow, StepBatch, Verdict, VerifyRow
from tests.support.engines.engine_rows import first_row, open_engine, verify
from tests.support.models import tiny
from workers.sampling.logprobs import launch_logprobs, token_logprobs
from workers.transfer import HostCopies
from workers.verify.decider import LaunchedDecisions, launch_rows
from workers.verify.engine import TargetEngine
from workers.verify.prompt_logprobs import without_prompts

PROMPT = (5, 17, 33, 8, 60, 41, 41, 9, 12, 77, 3)
SCORED = SamplingParameters(temperature=0.0, prompt_logprobs=3, logprobs=1)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("scored"), tiny.llama())


@pytest.fixture(scope="module")
def engine(directory: Path) -> TargetEngine:
    return open_engine(directory)


def in_chunks(engine: TargetEngine, name: str, sizes: Sequence[int]) -> list[Verdict]:
    """The verdicts on the chunks of the prompt."""
    verdicts, start = [], 0
    for size in sizes:
        end = start + size
        row = VerifyRow(
            SequenceId(name),
            end,
            PROMPT[start:end],
            decide=end == len(PROMPT),
            start=None if start else SequenceStart(len(PROMPT), SCORED),
        )
        verdicts.append(verify(engine, row))
        start = end
    return verdicts


def scores(verdicts: Sequence[Verdict]) -> list[TokenLogprobs]:
    return [entry for verdict in verdicts for entry in verdict.prompt_logprobs]


def test_they_are_the_models_own(engine: TargetEngine, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0].double().log_softmax(dim=-1)
    found = scores(in_chunks(engine, "whole", [len(PROMPT)]))
    assert [entry.token for entry in found] == [*PROMPT[1:]]
    for position, entry in enumerate(found):
        best = logits[position].topk(3)
        assert entry.logprob == pytest.approx(float(logits[position, entry.token]), abs=TOLERANCE)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("sizes", [[4, 4, 3], [1] * 11, [10, 1], [1, 10]])
def test_chunks_change_nothing_and_each_token_is_scored_once(engine: TargetEngine, sizes: list[int]) -> None:
    whole, parts = in_chunks(engine, "a", [len(PROMPT)]), in_chunks(engine, "b", sizes)
    assert [entry.token for entry in scores(parts)] == [*PROMPT[1:]]
    for one, other in zip(scores(whole), scores(parts), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
    assert parts[-1].tokens == whole[-1].tokens
    assert len(parts[-1].logprobs) == 1


def test_a_row_that_is_repeated_after_a_failed_step_is_scored_as_without_it(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = iter([False, True, False, True, False])

    def decide_or_fail(*step: Any) -> LaunchedDecisions:
        if next(fails):
            raise RuntimeError("out of memory")
        return launch_rows(*step)

    monkeypatch.setattr("workers.verify.engine.launch_rows", decide_or_fail)
    rows = [
        VerifyRow(SequenceId("h"), 4, PROMPT[:4], decide=False, start=SequenceStart(len(PROMPT), SCORED)),
        VerifyRow(SequenceId("h"), 10, PROMPT[4:10], decide=False),
        VerifyRow(SequenceId("h"), 11, PROMPT[10:]),
    ]
    verdicts = [verify(engine, rows[0])]
    for row in rows[1:]:
        with pytest.raises(RuntimeError, match="out of memory"):
            verify(engine, row)
        verdicts.append(verify(engine, row))
    found = scores(verdicts)
    monkeypatch.undo()
    assert found == scores(in_chunks(engine, "i", [4, 6, 1]))


def test_other_rows_of_the_step_are_decided_as_alone(engine: TargetEngine) -> None:
    alone = verify(engine, first_row("c", PROMPT[:6]))
    scored = VerifyRow(SequenceId("d"), len(PROMPT), PROMPT, start=SequenceStart(len(PROMPT), SCORED))
    for rows in ([first_row("c", PROMPT[:6]), scored], [scored, first_row("c", PROMPT[:6])]):
        verdicts = {verdict.sequence_id: verdict for verdict in engine.step(StepBatch(tuple(rows))).verdicts}
        assert verdicts[SequenceId("c")].tokens == alone.tokens
        assert not verdicts[SequenceId("c")].prompt_logprobs
        assert len(verdicts[SequenceId("d")].prompt_logprobs) == len(PROMPT) - 1
        engine.release([SequenceId("c"), SequenceId("d")])


def test_all_scored_rows_of_a_step_are_scored_together(engine: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes rows whose last chunk left logits behind."""
    calls: list[int] = []

    def counted(function: Any) -> Any:
        def called(logits: Any, tokens: Sequence[int], *others: Any) -> Any:
            calls.append(len(tokens))
            return function(logits, tokens, *others)

        return called

    monkeypatch.setattr("workers.verify.prompt_logprobs.launch_logprobs", counted(launch_logprobs))
    monkeypatch.setattr("workers.verify.verdicts.token_logprobs", counted(token_logprobs))
    alone = scores(in_chunks(engine, "j", [4, 7]))
    engine.release([SequenceId("j")])
    start = SequenceStart(len(PROMPT), SCORED)
    first = [VerifyRow(SequenceId(name), 4, PROMPT[:4], decide=False, start=start) for name in "kl"]
    rest = [VerifyRow(SequenceId(name), len(PROMPT), PROMPT[4:]) for name in "kl"]
    calls.clear()
    verdicts = [engine.step(StepBatch(tuple(rows))).verdicts for rows in (first, rest)]
    assert calls == [2 * 3, 2 * 7, 2]  # at last what is decided
    for chunks in zip(*verdicts, strict=True):
        for one, other in zip(scores(chunks), alone, strict=True):
            assert (one.token, one.rank) == (other.token, other.rank)
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
    engine.release([SequenceId("k"), SequenceId("l")])


def test_a_last_token_is_scored_beside_other_rows_where_a_rank_has_a_part_of_the_vocabulary() -> None:
    whole = torch.randn(1, 100)
    start = SequenceStart(len(PROMPT), SCORED)

    def ready(pending: Sequence[int], end: torch.Tensor | None) -> Any:
        sequence = SimpleNamespace(prompt_end=end, start=start)
        return SimpleNamespace(scored=0, sequence=sequence, row=SimpleNamespace(pending=pending))

    other, last = ready((7,), None), ready((77,), whole)
    decider: Any = None  # no row sends logits to rank 0
    _, found = without_prompts([other, last], torch.randn(2, 50), decider, HostCopies())
    assert found[1].read() == token_logprobs(whole, [77], [3])
    assert not found[0].read()


def test_a_scored_prompt_takes_nothing_from_the_prefix_cache(engine: TargetEngine) -> None:
    in_chunks(engine, "e", [len(PROMPT)])
    engine.release([SequenceId("e")])
    plain = SequenceStart(len(PROMPT), SamplingParameters(temperature=0.0))
    assert engine.open([OpenRow(SequenceId("f"), PROMPT, plain)]).stored_lens[0] > 0
    assert engine.open([OpenRow(SequenceId("g"), PROMPT, SequenceStart(len(PROMPT), SCORED))]).stored_lens == (0,)
