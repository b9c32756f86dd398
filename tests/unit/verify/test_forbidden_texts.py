"""Texts that an answer must not contain are excluded at every node of a draft tree, so drafts change no token of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.drafting import RowFaultCode
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.request import SamplingParameters
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.engines.engine_rows import decode, first_row, open_engine, verify
from tests.support.engines.engine_sequence import BothTexts
from tests.support.models import tiny, tiny_tokenizer
from workers.verify.engine import TargetEngine

VOCABULARY = 320
COUNT = 60
PROMPT = (5, 17, 33, 8, 60, 41)
SAMPLINGS = {
    "greedy": SamplingParameters(temperature=0.0, repetition_penalty=1.3),
    "sampled": SamplingParameters(temperature=0.9, top_p=0.95, seed=7),
    "with logprobs": SamplingParameters(temperature=0.0, repetition_penalty=1.3, logprobs=2),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("texts"))
    return tiny.save(directory, tiny.llama(vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def engine(directory: Path) -> TargetEngine:
    return open_engine(directory, directory=directory)


def frequent_texts(text: str) -> tuple[str, ...]:
    """What an answer without bad texts begins words with: pieces that the tokens of several positions spell."""
    starts = [at for at in range(1, len(text) - 3) if text[at].isalnum() and not text[at - 1].isalnum()]
    pieces = [text[at : at + length] for at in starts for length in (1, 2, 3)]
    return tuple(dict.fromkeys(piece for piece in pieces if piece.isalnum()))[:12]


@pytest.mark.parametrize("name", sorted(SAMPLINGS))
def test_no_word_of_an_answer_begins_with_a_bad_text_and_no_draft_changes_it(
    engine: TargetEngine, directory: Path, name: str
) -> None:
    tokenizer, sampling = Tokenizer.load(directory), SAMPLINGS[name]
    free = decode(engine, PROMPT, COUNT, sampling)
    bad = frequent_texts(tokenizer.decode(free))
    assert bad
    parameters = replace(sampling, bad_texts=bad)
    plain = decode(engine, PROMPT, COUNT, parameters)
    text = tokenizer.decode(plain)
    assert plain != free
    for word in bad:
        begins = [at for at in range(len(text)) if text.startswith(word, at)]
        assert all(at > 0 and text[at - 1].isalnum() for at in begins), (word, text)
    drafts = BothTexts([*PROMPT, *plain], [*PROMPT, *free], VOCABULARY)
    assert decode(engine, PROMPT, COUNT, parameters, drafts) == plain
    assert drafts.steps < COUNT / 2  # drafts were accepted


def test_a_grammar_and_bad_texts_hold_together(engine: TargetEngine, directory: Path) -> None:
    grammar = Grammar(GrammarKind.REGEX, "(he|hello|world|fish| ){60}")
    sampling = SamplingParameters(temperature=0.9, seed=3, grammar=grammar, end_token_ids=(2,))
    tokenizer = Tokenizer.load(directory)
    assert "he" in tokenizer.decode(decode(engine, PROMPT, 30, sampling))
    text = tokenizer.decode(decode(engine, PROMPT, 30, replace(sampling, bad_texts=("h",))))
    assert not text.startswith("h") and " h" not in text


def test_a_target_without_a_tokenizer_refuses_the_request_alone(directory: Path) -> None:
    verdict = verify(open_engine(directory), first_row("b", PROMPT, SamplingParameters(bad_texts=("he",))))
    assert verdict.fault is not None
    assert verdict.fault.code is RowFaultCode.INVALID
    assert "tokenizer" in verdict.fault.message
