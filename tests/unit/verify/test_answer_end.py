"""The target accepts no draft token after one that ends the answer, and stores nothing of it."""

from __future__ import annotations

import pytest

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftBudget
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from tests.support.engines.engine_sequence import generate, sequence_on, some_tokens
from tests.support.models.model_cases import ModelCase
from workers.draft.registry import create
from workers.verify.colocated import ColocatedDrafter, VerifiedRow
from workers.verify.engine import TargetEngine

NAME = SequenceId("ending")
PROMPT = some_tokens(14)


def first_row(drafted: list[int], **sampling: object) -> VerifyRow:
    """The prompt with a chain of drafted tokens."""
    parameters = SamplingParameters(temperature=0.0, **sampling)  # type: ignore[arg-type]
    start = SequenceStart(len(PROMPT), parameters)
    return VerifyRow(NAME, len(PROMPT), tuple(PROMPT), TokenTree.chain(drafted), start=start)


def verdict(engine: TargetEngine, drafted: list[int], **sampling: object) -> Verdict:
    return engine.step(StepBatch((first_row(drafted, **sampling),))).verdicts[0]


@pytest.mark.parametrize("ends_after", [1, 2, 7, 12])
def test_a_block_is_accepted_up_to_the_first_end_token(case: ModelCase, ends_after: int) -> None:
    engine = case.engine()
    answer = generate(case.engine(), PROMPT, 13)
    end = answer[ends_after - 1]
    length = answer.index(end) + 1
    found = verdict(engine, answer[:12], end_token_ids=(end,))
    assert list(found.tokens) == answer[:length]
    assert found.accepted == length - 1
    engine.release([NAME])
    later = sequence_on(engine, [*PROMPT, *answer], "later")
    stored = len(PROMPT) + found.accepted
    assert later.open() == stored - stored % 4  # whole blocks of what was accepted


def test_no_end_token_is_decided_before_the_minimal_length(case: ModelCase) -> None:
    engine = case.engine()
    answer = generate(case.engine(), PROMPT, 12)
    end = answer[2]
    found = verdict(engine, answer[:11], end_token_ids=(end,), min_tokens=6)
    first = answer.index(end)
    assert list(found.tokens[:first]) == answer[:first]
    assert found.tokens[first] != end and len(found.tokens) == first + 1
    plain = sequence_on(case.engine(), PROMPT, sampling=engine_sampling(end))
    plain.open()
    expected = plain.decode(12)
    assert end not in expected[:6]
    assert list(verdict(engine, expected[:11], end_token_ids=(end,), min_tokens=6).tokens) == (
        expected[: expected.index(end) + 1] if end in expected else expected
    )


def test_what_follows_the_end_in_a_draft_need_not_be_decidable(engine: TargetEngine) -> None:
    """Only the end token is allowed, and only once."""
    only_once = {"end_token_ids": (4,), "allowed_token_ids": (4,), "bad_words": ((4, 4),)}
    for drafted in ([], [4], [4, 4]):
        found = verdict(engine, drafted, **only_once)
        assert (found.fault, found.tokens) == (None, (4,))
        engine.release([NAME])


def engine_sampling(end: int) -> SamplingParameters:
    return SamplingParameters(temperature=0.0, end_token_ids=(end,), min_tokens=6)


@pytest.mark.parametrize(("last", "drafted"), [(7, 1), (8, 0)])
def test_nothing_is_drafted_for_an_answer_that_has_ended(last: int, drafted: int) -> None:
    sampling = SamplingParameters(temperature=0.0, end_token_ids=(8,))
    row = VerifyRow(NAME, 3, (5,), next_budget=DraftBudget(2, 2))
    tokens = (5, 7, 5, 7, 5)
    verified = VerifiedRow(row, SequenceStart(1, sampling), tokens, (last,), None)
    proposals = ColocatedDrafter(create(DraftSection(method="ngram"), TargetSection())).draft([verified])
    assert len(proposals) == drafted
