"""A grammar allows tokens at every node of a draft tree, so drafts change no token of an answer that it constrains."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from cluster.core.bounds import MAX_CHOICES
from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.drafting import RowFaultCode
from cluster.core.grammar import Grammar, GrammarKind, parser_limits
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, Verdict, VerifyRow
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.engines.engine_rows import first_row, open_engine, verify
from tests.support.engines.engine_sequence import Propose, no_draft
from tests.support.models import tiny, tiny_tokenizer
from workers.forward.runner import ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling import grammar as compiler_module
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.grammar import Attempt, GrammarCompiler, GrammarLimitError, GrammarMatcher
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


def record_compilations(engine: TargetEngine, monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    """The grammars that the engine compiles from now on, in this order."""
    compiler, compiled = engine._grammars._compiler, list[Grammar]()
    assert compiler is not None
    compile_now = compiler._compile

    def recorded(grammar: Grammar) -> LLMatcher:
        compiled.append(grammar)
        return compile_now(grammar)

    monkeypatch.setattr(compiler, "_compile", recorded)
    return compiled


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


def test_the_end_of_an_answer_is_the_end_that_the_tokenizer_names_where_the_model_names_none(tmp_path: Path) -> None:
    """The library would guess another special token, which ends no answer."""
    directory = tiny.save(tmp_path, tiny.llama(vocab_size=VOCABULARY, eos_token_id=None))
    tiny_tokenizer.byte_level(directory)
    (directory / "generation_config.json").unlink()
    engine = open_engine(directory, directory=directory)
    tokens, _ = answer(engine, replace(SAMPLINGS["greedy"], grammar=GRAMMARS["choice"]))
    assert tokens[-1] == END
    assert engine.info().eos_token_ids == Tokenizer.load(directory).eos_token_ids == (END,)
    check(GRAMMARS["choice"], text_of(directory, tokens))


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


def test_what_a_grammar_allows_is_found_after_the_pass_was_launched(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU computes the pass meanwhile."""
    forward, allowed, done = ModelRunner.forward, GrammarMatcher.allowed, list[str]()

    def launched(self: ModelRunner, *arguments: Any) -> torch.Tensor:
        done.append("pass")
        return forward(self, *arguments)

    def asked(self: GrammarMatcher, tree: TokenTree) -> tuple[AllowedTokens | None, ...]:
        done.append("grammar")
        return allowed(self, tree)

    monkeypatch.setattr(ModelRunner, "forward", launched)
    monkeypatch.setattr(GrammarMatcher, "allowed", asked)
    _, steps = answer(engine, replace(SAMPLINGS["greedy"], grammar=GRAMMARS["regex"]), most=4)
    assert steps > 2
    assert done == ["pass", "grammar"] * steps


def test_a_row_that_its_grammar_refuses_gives_its_blocks_back_at_once(engine: TargetEngine) -> None:
    begun = verify(engine, first_row("a", PROMPT, replace(SAMPLINGS["greedy"], grammar=GRAMMARS["regex"]))).tokens
    matcher = engine._sequences[SequenceId("a")].grammar
    assert matcher is not None
    (allowed,) = matcher.allowed(TokenTree())
    assert allowed is not None
    excluded = next(token for token in range(VOCABULARY) if not allowed.permits(token))
    tokens = verify(engine, first_row("b", PROMPT, SAMPLINGS["greedy"])).tokens
    free = engine.release([]).blocks_free
    wrong = VerifyRow(SequenceId("a"), len(PROMPT) + 2, (*begun, excluded), TokenTree.chain(range(10, 30)))
    result = engine.step(StepBatch((wrong, VerifyRow(SequenceId("b"), len(PROMPT) + 1, tokens))))
    refused, served = result.verdicts
    assert refused.fault is not None and refused.fault.code is RowFaultCode.INVALID
    assert refused.fault.message == "grammar: the answer so far does not match the grammar"
    assert result.kv.blocks_free == free, "the other row has room in its last block"
    engine.release([SequenceId("a")])
    alone = verify(engine, first_row("c", (*PROMPT, *tokens), SAMPLINGS["greedy"]))
    assert served.tokens == alone.tokens != ()
    kv = engine.release_all()
    assert kv.blocks_free == kv.blocks_total


def test_an_error_of_a_grammar_is_not_kept(engine: TargetEngine) -> None:
    compiler = engine._grammars._compiler
    assert compiler is not None
    wrong = replace(SAMPLINGS["greedy"], grammar=Grammar(GrammarKind.REGEX, "[a"))
    for _ in range(2):
        fault = verify(engine, first_row("wrong", PROMPT, wrong)).fault
        assert fault is not None and fault.code is RowFaultCode.INVALID and fault.message.startswith("grammar: ")
        assert (wrong.grammar, False) not in compiler._compiled
    engine.release_all()


def test_neither_other_answers_nor_drafts_use_up_the_limits_of_an_answer(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies of a compiled grammar share the states of its lexer, and the number of states is limited."""
    compiler, attempts = engine._grammars._compiler, list[Attempt]()
    assert compiler is not None
    make = compiler.matcher

    def noted(grammar: Grammar, prompt_len: int, attempt: Attempt = Attempt.SHARED) -> GrammarMatcher:
        attempts.append(attempt)
        return make(grammar, prompt_len, attempt)

    grammar = Grammar(GrammarKind.REGEX, "[a-z ]{10,60}!|[0-9a-z]{20,50}[?]")
    requests = [replace(SAMPLINGS["sampled"], seed=seed, grammar=grammar) for seed in range(4)]
    expected = [answer(engine, one) for one in requests]
    monkeypatch.setattr(compiler, "_compiled", type(compiler._compiled)())
    monkeypatch.setattr(compiler_module, "parser_limits", lambda: {**parser_limits(), "max_lexer_states": 80})
    monkeypatch.setattr(compiler, "matcher", noted)
    assert [answer(engine, one) for one in requests] == expected
    assert Attempt.SHARED_AGAIN in attempts
    steps = [
        answer(engine, one, guided(text, random.Random(3))) for one, (text, _) in zip(requests, expected, strict=True)
    ]
    assert [text for text, _ in steps] == [text for text, _ in expected]
    assert sum(fewer for _, fewer in steps) < sum(count for _, count in expected)
    assert len(attempts) < len(requests) * 2 * len(Attempt)  # not one in each step


Answers = dict[str, list[int]]


def step(engine: TargetEngine, rows: dict[str, VerifyRow], found: Answers) -> tuple[Verdict, ...]:
    """Verify a row of each answer that goes on, and replace those whose grammar is ready by the next ones."""
    names = sorted(rows)
    verdicts = engine.step(StepBatch(tuple(rows[name] for name in names))).verdicts
    for name, verdict in zip(names, verdicts, strict=True):
        if verdict.fault is not None:
            assert verdict.fault.code is RowFaultCode.NOT_READY, verdict.fault
            continue
        tokens = found.setdefault(name, list(PROMPT))
        tokens.extend(verdict.tokens)
        rows[name] = VerifyRow(SequenceId(name), len(tokens), (tokens[-1],))
        if tokens[-1] == END:
            del rows[name]
    return verdicts


def matcher_of(engine: TargetEngine, name: str) -> GrammarMatcher:
    matcher = engine._sequences[SequenceId(name)].grammar
    assert matcher is not None
    return matcher


def break_matchers(engine: TargetEngine, rows: dict[str, VerifyRow]) -> None:
    """Let the matchers of all answers end, as if they had used up their common limits."""
    for name in rows:
        if name != "plain":
            matcher = matcher_of(engine, name)
            assert not matcher._matcher.consume_token(0)
            assert matcher.is_broken


def test_answers_that_have_used_up_a_grammar_delay_no_other_row(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar is compiled once for all of them, then once more for each, one after another, beside the steps."""
    compiler, may_end, threads = engine._grammars._compiler, threading.Event(), list[str]()
    assert compiler is not None
    compile_now, begin, begun = compiler._compile, compiler._thread.submit, list[Grammar]()

    def slow(grammar: Grammar) -> LLMatcher:
        assert may_end.wait(60)
        threads.append(threading.current_thread().name)
        return compile_now(grammar)

    def noted(work: Callable[[Grammar], LLMatcher], grammar: Grammar) -> Future[LLMatcher]:
        begun.append(grammar)
        return begin(work, grammar)

    grammar = Grammar(GrammarKind.REGEX, "[a-z]{40,50}[.]")
    requests = {f"a{seed}": replace(SAMPLINGS["sampled"], seed=seed, grammar=grammar) for seed in range(3)}
    expected = {name: [*PROMPT, *answer(engine, one)[0]] for name, one in requests.items()}
    plain = replace(SAMPLINGS["sampled"], seed=9, end_token_ids=())
    rows = {name: first_row(name, PROMPT, one) for name, one in (requests | {"plain": plain}).items()}
    found = Answers()
    monkeypatch.setattr(compiler, "_compile", slow)
    monkeypatch.setattr(compiler._thread, "submit", noted)
    for _ in range(3):
        step(engine, rows, found)
    assert not begun
    try:
        for attempt, compilations in ((Attempt.SHARED_AGAIN, 1), (Attempt.OWN, 3), (Attempt.WITHOUT_DRAFTS, 3)):
            may_end.clear()
            begun.clear()
            break_matchers(engine, rows)
            for _ in range(4):
                before, since = len(found["plain"]), time.monotonic()
                faults = [verdict.fault is not None for verdict in step(engine, rows, found)]
                assert time.monotonic() - since < 5
                assert (faults, len(found["plain"])) == ([True, True, True, False], before + 1)
            assert len(begun) == 1
            may_end.set()
            lengths = {name: len(tokens) for name, tokens in found.items()}
            for _ in range(1000):
                now = len(begun)
                step(engine, rows, found)
                assert len(begun) <= now + 1
                if all(len(found[name]) > lengths[name] for name in requests):
                    break
                time.sleep(0.05)  # "plain" grows meanwhile, and its context is 256 tokens
            assert len(begun) == compilations
            assert {matcher_of(engine, name).attempt for name in requests} == {attempt}
    finally:
        may_end.set()
    while len(rows) > 1:
        step(engine, rows, found)
    assert {name: found[name] for name in requests} == expected
    assert set(threads) == {"grammars_0"}
    engine.release_all()


def test_drafts_that_make_a_grammar_too_complex_are_left_out(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = GrammarMatcher._here
    calls = 0

    def limited(matcher: GrammarMatcher) -> AllowedTokens:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise GrammarLimitError("the grammar is too complex")
        return here(matcher)

    parameters = replace(SAMPLINGS["sampled"], grammar=GRAMMARS["regex"])
    expected, _ = answer(engine, parameters)
    monkeypatch.setattr(GrammarMatcher, "_here", limited)
    first = verify(engine, replace(first_row("a", PROMPT, parameters), tree=TokenTree.chain(expected[:2])))
    assert (first.fault, first.tokens, first.drafted, calls) == (None, tuple(expected[:1]), 0, 3)
    row = VerifyRow(SequenceId("a"), len(PROMPT) + 1, first.tokens, TokenTree.chain(expected[1:3]))
    assert verify(engine, row).tokens == tuple(expected[1:4])
    engine.release_all()


def test_a_limit_that_is_reached_in_a_tree_excludes_no_node_in_silence(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library refuses tokens before it reports an error, and what is decided after a refused node has no mask."""
    tokenizer = Tokenizer.load(directory)
    prefix, text = tokenizer.encode('"'), tokenizer.encode("hello the world of fish, swim here")
    grammar, tree = Grammar.of_schema({"type": "string", "maxLength": 200}), TokenTree.chain(text)
    found: dict[str, int] = {}

    def masks() -> list[list[bool] | None]:
        compiler = GrammarCompiler(directory, VOCABULARY, (END,))
        matcher = compiler.matcher(grammar, 0)
        matcher.follow(prefix, len(prefix))
        return [None if one is None else one.mask.tolist() for one in matcher.allowed(tree)]

    expected = masks()
    assert None not in expected
    for states in range(3, 420, 3):
        limits = {**parser_limits(), "max_lexer_states": states}
        monkeypatch.setattr(compiler_module, "parser_limits", lambda limits=limits: limits)
        try:
            known = masks()
        except GrammarLimitError:
            known = []
        assert known in ([], expected[:1], expected), states
        outcome = {0: "nothing", 1: "the root"}.get(len(known), "all")
        found[outcome] = found.get(outcome, 0) + 1
    assert set(found) == {"nothing", "the root", "all"}


@pytest.mark.parametrize("lark", ["[max_tokens=12]: /[a-z ]+/", '[stop="!"]: /[a-z ]+/'])
def test_a_grammar_whose_matchers_cannot_go_back_is_answered_without_drafts(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch, lark: str
) -> None:
    grammar = Grammar(GrammarKind.GRAMMAR, f'start: "(" text ")" /[0-9]{{8}}/\ntext{lark}')
    parameters = replace(SAMPLINGS["sampled"], grammar=grammar)
    plain, _ = answer(engine, parameters)
    compiled = record_compilations(engine, monkeypatch)
    drafted, _ = answer(engine, parameters, guided(plain, random.Random(3)))
    assert drafted == plain
    assert 0 < len(compiled) < len(Attempt)


def test_a_step_with_more_grammars_than_are_kept_compiles_each_of_them_once(
    engine: TargetEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each step would drop grammars that its own rows need, and its rows might never begin."""
    compiler, compiled = engine._grammars._compiler, record_compilations(engine, monkeypatch)
    assert compiler is not None
    monkeypatch.setattr(compiler_module, "_MOST_CACHED", 2)
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
