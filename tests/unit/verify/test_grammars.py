"""A grammar allows tokens at every node of a draft tree, so drafts change no token of an answer that it constrains."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLMatcher

from cluster.core.bounds import MAX_CHOICES
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import RowFaultCode
from cluster.core.grammar import Grammar, GrammarKind, parser_limits
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, VerifyRow
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.engines.engine_rows import first_row, verify
from tests.support.engines.engine_sequence import Propose, no_draft
from tests.support.models import tiny, tiny_tokenizer
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling import grammar as compiler_module
from workers.sampling.context import AllowedTokens
from workers.sampling.grammar import GrammarError, GrammarMatcher
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

VOCABULARY = 320
END = 2
PROMPT = (5, 17, 33, 8, 60, 41)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fish", "hello", "the world"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "swims": {"type": "boolean"},
    },
    "required": ["name", "sizes", "swims"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.of_schema(SCHEMA),
    "regex": Grammar(GrammarKind.REGEX, "(he|hello|world/)+[0-9]{2,5}"),
    "choice": Grammar.of_choices(["hello world", "hell", 'the "fish"\n', "swim"]),
    "as many choices as are allowed": Grammar.of_choices([f"the {i}th fish" for i in range(MAX_CHOICES)]),
    "lark": Grammar(GrammarKind.GRAMMAR, 'start: "(" (start | WORD) ")"\nWORD: "fish" | "swim" | "he"'),
}
SAMPLINGS = {
    "greedy": SamplingParameters(temperature=0.0, end_token_ids=(END,)),
    "sampled": SamplingParameters(temperature=0.9, seed=7, end_token_ids=(END,)),
    "truncated": SamplingParameters(temperature=1.2, top_p=0.9, top_k=20, seed=8, end_token_ids=(END,)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("grammars"))
    return tiny.save(directory, tiny.llama(vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def engine(directory: Path) -> TargetEngine:
    model = load_model(ModelSection(path=str(directory), device="cpu"))
    pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=200)
    return TargetEngine(model, pool, LocalDecider(), EngineOptions(directory=directory))


def answer(
    engine: TargetEngine, sampling: SamplingParameters, draft: Propose = no_draft, most: int = 100
) -> tuple[list[int], int]:
    """The answer up to its end, and the number of steps."""
    tokens, steps = list(PROMPT), 1
    verdict = verify(engine, first_row("a", PROMPT, sampling))
    while True:
        assert verdict.fault is None, verdict.fault
        tokens.extend(verdict.tokens)
        if tokens[-1] == END or len(tokens) > len(PROMPT) + most:
            break
        steps += 1
        verdict = verify(engine, VerifyRow(SequenceId("a"), len(tokens), (tokens[-1],), draft(tokens)))
    engine.release([SequenceId("a")])
    return tokens[len(PROMPT) :], steps


def guided(expected: Sequence[int], draw: random.Random) -> Propose:
    """Trees with the expected continuation and wrong branches, some of which the grammar excludes."""

    def draft(tokens: Sequence[int]) -> TokenTree:
        right = list(expected[len(tokens) - len(PROMPT) :][: draw.randint(0, 5)])
        wrong = [[*right[: draw.randint(0, 2)], *draw.choices(range(VOCABULARY), k=2)] for _ in range(3)]
        return TokenTree.from_candidates([*wrong[:1], right, *wrong[1:]], max_nodes=12)

    return draft


def text_of(directory: Path, tokens: Sequence[int]) -> str:
    return Tokenizer.load(directory).decode(tokens[:-1])


@pytest.mark.parametrize("kind", sorted(GRAMMARS))
@pytest.mark.parametrize("sampling", sorted(SAMPLINGS))
def test_an_answer_matches_its_grammar_and_no_draft_changes_it(
    engine: TargetEngine, directory: Path, kind: str, sampling: str
) -> None:
    grammar = GRAMMARS[kind]
    parameters = replace(SAMPLINGS[sampling], grammar=grammar, min_tokens=0)
    plain, steps = answer(engine, parameters)
    if plain[-1] == END:
        check(grammar, text_of(directory, plain))
    drafted, fewer = answer(engine, parameters, guided(plain, random.Random(3)))
    assert drafted == plain
    assert fewer < steps


def check(grammar: Grammar, text: str) -> None:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), json.loads(grammar.text))
        case GrammarKind.REGEX:
            assert re.fullmatch(grammar.text, text)
        case GrammarKind.CHOICE:
            assert text in grammar.choices
        case _:
            assert text.strip("()") in ("fish", "swim", "he") and text.count("(") == text.count(")")


def test_a_grammar_that_is_compiled_for_long_delays_no_other_row(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, may_end = engine._grammars._compiler, threading.Event()
    assert compiler is not None
    compile_now = compiler._compile

    def slow(grammar: Grammar) -> LLMatcher:
        assert may_end.wait(60)
        return compile_now(grammar)

    monkeypatch.setattr(compiler, "_compile", slow)
    constrained = replace(SAMPLINGS["greedy"], grammar=Grammar(GrammarKind.REGEX, "(fish){3}"))
    waiting, plain = first_row("waiting", PROMPT, constrained), first_row("plain", PROMPT, SAMPLINGS["greedy"])
    try:
        for length in range(len(PROMPT), len(PROMPT) + 3):
            begun = time.monotonic()
            late, prompt = engine.step(StepBatch((waiting, plain))).verdicts
            assert time.monotonic() - begun < 5
            assert late.fault is not None and late.fault.code is RowFaultCode.NOT_READY
            assert prompt.fault is None and len(prompt.tokens) == 1
            plain = VerifyRow(SequenceId("plain"), length + 1, prompt.tokens)
    finally:
        may_end.set()
    assert verify(engine, waiting).fault is None
    engine.release_all()


def test_an_error_of_a_grammar_is_not_kept(engine: TargetEngine) -> None:
    compiler = engine._grammars._compiler
    assert compiler is not None
    wrong = replace(SAMPLINGS["greedy"], grammar=Grammar(GrammarKind.REGEX, "[a"))
    for _ in range(2):
        fault = verify(engine, first_row("wrong", PROMPT, wrong)).fault
        assert fault is not None and fault.code is RowFaultCode.INVALID and fault.message.startswith("grammar: ")
        assert wrong.grammar not in compiler._compiled
    engine.release_all()


def test_neither_other_answers_nor_drafts_use_up_the_limits_of_an_answer(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies of a compiled grammar share the states of its lexer, and the number of states is limited."""
    compiler, own = engine._grammars._compiler, list[Grammar]()
    assert compiler is not None
    make_own = compiler.own_matcher

    def counted(grammar: Grammar, prompt_len: int) -> GrammarMatcher:
        own.append(grammar)
        return make_own(grammar, prompt_len)

    grammar = Grammar(GrammarKind.REGEX, "[a-z ]{10,60}!|[0-9a-z]{20,50}[?]")
    requests = [replace(SAMPLINGS["sampled"], seed=seed, grammar=grammar) for seed in range(4)]
    expected = [answer(engine, one) for one in requests]
    monkeypatch.setattr(compiler, "_compiled", type(compiler._compiled)())
    monkeypatch.setattr(compiler_module, "parser_limits", lambda one: {**parser_limits(one), "max_lexer_states": 80})
    monkeypatch.setattr(compiler, "own_matcher", counted)
    assert [answer(engine, one) for one in requests] == expected
    assert 0 < len(own) < sum(steps for _, steps in expected)
    for one, (text, steps) in zip(requests, expected, strict=True):
        drafted, fewer = answer(engine, one, guided(text, random.Random(3)))
        assert drafted == text
        assert fewer < steps


def test_drafts_that_make_a_grammar_too_complex_are_left_out(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed_at = GrammarMatcher.allowed

    def limited(matcher: GrammarMatcher, tree: TokenTree) -> tuple[AllowedTokens | None, ...]:
        if tree:
            raise GrammarError("the grammar is too complex")
        return allowed_at(matcher, tree)

    parameters = replace(SAMPLINGS["sampled"], grammar=GRAMMARS["regex"])
    expected, _ = answer(engine, parameters)
    monkeypatch.setattr(GrammarMatcher, "allowed", limited)
    first = verify(engine, replace(first_row("a", PROMPT, parameters), tree=TokenTree.chain(expected[:2])))
    assert (first.fault, first.tokens, first.drafted) == (None, tuple(expected[:1]), 0)
    engine.release_all()


def test_a_step_with_more_grammars_than_are_kept_compiles_each_of_them_once(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each step would drop grammars that its own rows need, and its rows might never begin."""
    compiler, compiled = engine._grammars._compiler, list[Grammar]()
    assert compiler is not None
    compile_now = compiler._compile

    def counted(grammar: Grammar) -> LLMatcher:
        compiled.append(grammar)
        return compile_now(grammar)

    monkeypatch.setattr(compiler_module, "_MOST_CACHED", 2)
    monkeypatch.setattr(compiler, "_compile", counted)
    grammars = [Grammar(GrammarKind.REGEX, f"(swim){{{count}}}") for count in range(2, 7)]
    rows = [first_row(one.text, PROMPT, replace(SAMPLINGS["greedy"], grammar=one)) for one in grammars]
    while rows:
        faults = [verdict.fault for verdict in engine.step(StepBatch(tuple(rows))).verdicts]
        assert all(fault is None or fault.code is RowFaultCode.NOT_READY for fault in faults)
        rows = [row for row, fault in zip(rows, faults, strict=True) if fault is not None]
    assert compiled == grammars
    verify(engine, first_row("plain", PROMPT, SAMPLINGS["greedy"]))
    assert len(compiler._compiled) == 2
    engine.release_all()
