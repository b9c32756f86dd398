"""Tokens that a request excludes are excluded at every node of a draft tree, so drafts change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.drafting import RowFaultCode
from cluster.core.request import SamplingParameters
from tests.support.engines.engine_rows import PROMPT, decode, first_row, open_engine, verify
from tests.support.engines.engine_sequence import BothTexts
from tests.support.models import tiny
from workers.verify.engine import TargetEngine

COUNT = 40
GREEDY = SamplingParameters(temperature=0.0, repetition_penalty=1.3)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TargetEngine:
    directory: Path = tiny.save(tmp_path_factory.mktemp("excluded"), tiny.llama())
    return open_engine(directory)


def restricted(kind: str, sampling: SamplingParameters, plain: Sequence[int]) -> SamplingParameters:
    """Parameters that exclude some of the tokens of the plain answer."""
    if kind == "allowed":
        return replace(sampling, allowed_token_ids=tuple(range(0, tiny.VOCABULARY, 3)))
    if kind == "bad words":
        return replace(sampling, bad_words=((plain[0],), tuple(plain[3:5]), tuple(plain[10:13])))
    if kind == "repeated n-grams":
        size = 1 if sampling.temperature else 2  # what is sampled repeats no pair by itself
        return replace(sampling, repetition_penalty=1.0, no_repeat_ngram_size=size)
    return replace(sampling, end_token_ids=tuple(plain[2:9]), min_tokens=COUNT)


def contains(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[start : start + len(word)]) == tuple(word) for start in range(len(tokens)))


@pytest.mark.parametrize("kind", ["allowed", "bad words", "minimal length", "repeated n-grams"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_excluded_tokens_never_occur_and_no_draft_changes_the_text(
    engine: TargetEngine, kind: str, sampling: SamplingParameters
) -> None:
    free = decode(engine, PROMPT, COUNT, sampling)
    parameters = restricted(kind, sampling, free)
    plain = decode(engine, PROMPT, COUNT, parameters)
    assert plain != free
    if parameters.allowed_token_ids:
        assert set(plain) <= set(parameters.allowed_token_ids)
    assert not any(contains(plain, word) for word in parameters.bad_words)
    assert not set(plain) & set(parameters.end_token_ids)
    if size := parameters.no_repeat_ngram_size:
        text = [*PROMPT, *plain]
        ngrams = [tuple(text[end - size : end]) for end in range(size, len(text) + 1)]
        assert not {ngram for ngram in ngrams[len(PROMPT) - size + 1 :] if ngrams.count(ngram) > 1}
    drafts = BothTexts([*PROMPT, *plain], [*PROMPT, *free])
    assert decode(engine, PROMPT, COUNT, parameters, drafts) == plain
    assert drafts.steps < COUNT / 2  # drafts were accepted


def test_a_request_that_excludes_every_token_fails_alone(engine: TargetEngine) -> None:
    nothing = replace(GREEDY, allowed_token_ids=(4,), bad_words=((4,),))
    verdict = verify(engine, first_row("b", PROMPT, nothing))
    assert verdict.fault is not None
    assert verdict.fault.code is RowFaultCode.INVALID
    assert "excludes all tokens" in verdict.fault.message
