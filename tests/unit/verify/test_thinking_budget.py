"""The end of thinking is forced at every node of a draft tree, so drafts change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.request import SamplingParameters, ThinkingBudget
from cluster.core.tree import TokenTree
from tests.support.engines.engine_rows import PROMPT, decode, open_engine
from tests.support.models import tiny, tiny_tokenizer

COUNT = 32
END = (61, 2, 44)
GREEDY = SamplingParameters(temperature=0.0, repetition_penalty=1.3)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 1, 10])
def test_the_end_of_thinking_is_forced_inside_a_draft_and_no_draft_changes_the_text(
    tmp_path: Path, sampling: SamplingParameters, budget: int
) -> None:
    engine = open_engine(tiny.save(tmp_path, tiny.llama()))
    free = decode(engine, PROMPT, COUNT, sampling)
    bounded = replace(sampling, thinking=ThinkingBudget(budget, (), END))
    plain = decode(engine, PROMPT, COUNT, bounded)
    assert plain[:budget] == free[:budget]
    assert tuple(plain[budget : budget + len(END)]) == END
    assert not any(tuple(plain[at : at + len(END)]) == END for at in range(budget + 1, COUNT))
    right, unbounded = [*PROMPT, *plain, *range(9)], [*PROMPT, *free, *range(9)]
    steps = 0

    def propose(tokens: Sequence[int]) -> TokenTree:
        """Both texts in one tree: its nodes are before, on and behind the forced tokens, and beside them."""
        nonlocal steps
        steps += 1
        at = len(tokens)
        return TokenTree.from_candidates([right[at : at + 7], unbounded[at : at + 7]], max_nodes=14)

    assert decode(engine, PROMPT, COUNT, bounded, propose) == plain
    assert steps <= COUNT / 4  # drafts were accepted, over the forced tokens too


@pytest.mark.parametrize("bad_texts", [(), ("think",)], ids=["", "bad texts"])
def test_where_a_grammar_refuses_the_end_within_a_character_it_is_forced_after_the_character(
    tmp_path: Path, bad_texts: tuple[str, ...]
) -> None:
    """The one token that the model may think is the first byte of a character of two bytes."""
    directory = tiny.save(tiny_tokenizer.byte_level(tmp_path), tiny.llama(vocab_size=320))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first, _ = tokenizer.encode("é").ids
    closing = tuple(tokenizer.encode("</think>").ids)
    grammar = 'start: thought answer\nthought[suffix="</think>"]: /(?s:.*)/\nanswer: "hello"'
    sampling = SamplingParameters(
        temperature=0.0,
        grammar=Grammar(GrammarKind.GRAMMAR, grammar),
        thinking=ThinkingBudget(1, (), closing),
        bad_texts=bad_texts,
        logit_bias=((first, 100.0),),
        end_token_ids=(2,),
    )
    engine = open_engine(directory, directory=directory)
    plain = decode(engine, PROMPT, 2 + len(closing), sampling)
    assert plain[0] == first
    assert tokenizer.decode(plain)[1:] == "</think>"
    right, proposed = [*PROMPT, *plain], []

    def propose(tokens: Sequence[int]) -> TokenTree:
        proposed.append(TokenTree.chain(right[len(tokens) :]))
        return proposed[-1]

    assert decode(engine, PROMPT, len(plain), sampling, propose) == plain
    assert len(proposed) < len(plain) / 2
