"""Random schemas: what the masks allow validates, and masks depend on nothing but grammar and tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core.answer_format import AnswerFormat, ReasoningFormat
from cluster.core.answer_format_rows import CALL_FORMATS
from cluster.core.grammar import Grammar, GrammarKind
from cluster.core.tree import TokenTree
from cluster.generation.grammar.constraints import after_reasoning
from cluster.generation.grammar.tool_calls import ANY_TOOL, tool_call_grammar
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.models.tiny_tokenizer import byte_level
from workers.sampling.grammar import GrammarCompiler, GrammarMatcher

pytestmark = pytest.mark.slow

VOCABULARY = 320
END = 2
PROMPT = (7, 8, 9)
MOST = 600
NAMES = ("a", "name", "hello world", 'quo"te', "é")


def integers(least: int, more: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": least + more}


def strings(least: int, more: int) -> dict[str, Any]:
    return {"type": "string", "minLength": least, "maxLength": least + more}


values = st.lists(st.sampled_from([*NAMES, 1, None, True]), min_size=1, max_size=3, unique_by=json.dumps)
leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "fish"}]),
    st.just({"type": "string", "pattern": "^(he|wo)[0-9]{1,3}$"}),
    st.builds(integers, st.integers(-50, 50), st.integers(0, 300)),
    st.builds(strings, st.integers(0, 3), st.integers(0, 4)),
    st.builds(lambda found: {"enum": found}, values),
)


def objects(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda properties, count: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:count],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(NAMES), children, max_size=3),
        st.integers(0, 3),
    )


def arrays(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 1},
        children,
        st.integers(0, 2),
    )


schemas = st.recursive(
    leaves,
    lambda children: st.one_of(
        objects(children), arrays(children), st.builds(lambda one, two: {"anyOf": [one, two]}, children, children)
    ),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("tokenizer"))


def allowed(matcher: GrammarMatcher) -> list[int]:
    (root,) = matcher.allowed(TokenTree())
    assert root is not None
    return root.mask.nonzero().squeeze(1).tolist()


def follow_one(directory: Path, grammar: Grammar, draw: random.Random, most: int) -> list[int]:
    """Write an answer of random allowed tokens. Compares the masks at nodes of trees with those of new matchers."""
    compiler = GrammarCompiler(directory, VOCABULARY, (END,))
    matcher = compiler.matcher(grammar, len(PROMPT))
    tokens: list[int] = list(PROMPT)
    while tokens[-1] != END and len(tokens) < most:
        matcher.follow(tokens, len(tokens))
        likely = [[draw.choice(allowed(matcher)), draw.randrange(VOCABULARY)] for _ in range(2)]
        tree = TokenTree.from_candidates([draw.choices(range(VOCABULARY), k=2), *likely], max_nodes=6)
        masks = matcher.allowed(tree)
        assert masks[0] is not None
        now = masks[0].mask.nonzero().squeeze(1).tolist()
        forced = matcher.forced(8)
        assert not forced or now == [forced[0]]
        assert END in now or not masks[0].is_complete
        for node, mask in enumerate(masks[1:]):
            before = masks[tree.parents[node] + 1]
            can_follow = before is not None and bool(before.mask[tree.tokens[node]]) and tree.tokens[node] != END
            assert (mask is not None) == can_follow
            if mask is not None:
                path, other = [*tokens, *tree.path_tokens(node)], compiler.matcher(grammar, len(PROMPT))
                other.follow(path, len(path))
                assert allowed(other) == mask.mask.nonzero().squeeze(1).tolist()
        tokens.append(draw.choice(now))
    return tokens


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 1000))
def test_what_the_masks_allow_validates_and_depends_on_the_tokens_alone(
    directory: Path, schema: dict[str, Any], seed: int
) -> None:
    tokens = follow_one(directory, Grammar.of_schema(schema), random.Random(seed), MOST)
    if tokens[-1] == END:
        jsonschema.validate(json.loads(Tokenizer.load(directory).decode(tokens[len(PROMPT) : -1])), schema)
    else:
        assert len(tokens) == MOST


TOOLS = [
    json.dumps({"function": {"name": name, "parameters": {"type": "object", "properties": {"to": kind}}}})
    for name, kind in (("swim", {"type": "string"}), ("rest", {"enum": ["reef", "the coast"]}))
]
SPECIALS = {"<|endoftext|>": 0, "<|im_start|>": 1}
THOUGHT = AnswerFormat(reasoning=ReasoningFormat("text", "<think>", "</think>"))
GRAMMARS = {
    form.name: tool_call_grammar(TOOLS, ANY_TOOL, form, {}, single=False)
    for form in CALL_FORMATS
    if form.name in ("hermes", "mistral_v3", "qwen3_coder", "gemma4", "pythonic", "openai")
}
GRAMMARS |= {
    "reasoning": after_reasoning(Grammar.of_choices(["hello", "the world"]), THOUGHT, {}, is_call=False),
    "reasoning between special tokens": after_reasoning(
        Grammar.of_choices(["hello", "the world"]),
        AnswerFormat(reasoning=ReasoningFormat("special", "<|im_start|>", "<|endoftext|>")),
        SPECIALS,
        is_call=False,
    ),
    "regex": Grammar(GrammarKind.REGEX, "(he|hello|wo+rld) [0-9é]{2,9}"),
    "recursive": Grammar(GrammarKind.GRAMMAR, 'start: "(" (start | /[a-z]+/) ")"'),
}


@pytest.mark.parametrize("name", sorted(GRAMMARS))
@pytest.mark.parametrize("seed", range(4))
def test_masks_of_every_kind_of_grammar_depend_on_the_tokens_alone(directory: Path, name: str, seed: int) -> None:
    assert len(follow_one(directory, GRAMMARS[name], random.Random(seed), 80)) >= len(PROMPT) + 2
