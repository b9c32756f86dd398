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

from cluster.core.grammar import Grammar
from cluster.core.tree import TokenTree
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


@settings(max_examples=60, deadline=None)
@given(schema=schemas, seed=st.integers(0, 1000))
def test_what_the_masks_allow_validates_and_depends_on_the_tokens_alone(
    directory: Path, schema: dict[str, Any], seed: int
) -> None:
    compiler = GrammarCompiler(directory, VOCABULARY, (END,))
    grammar = Grammar.of_schema(schema)
    matcher, other = compiler.matcher(grammar, len(PROMPT)), compiler.matcher(grammar, len(PROMPT))
    draw = random.Random(seed)
    tokens: list[int] = list(PROMPT)
    while tokens[-1] != END and len(tokens) < MOST:
        matcher.follow(tokens, len(tokens))
        tree = TokenTree.from_candidates([draw.choices(range(VOCABULARY), k=2), [draw.choice(allowed(matcher))]], 4)
        masks = matcher.allowed(tree)
        assert masks[0] is not None
        now = masks[0].mask.nonzero().squeeze(1).tolist()
        forced = matcher.forced(8)
        assert not forced or now == [forced[0]]
        assert END in now or not masks[0].is_complete
        for node, mask in enumerate(masks[1:]):
            excluded = tree.parents[node] == -1 and tree.tokens[node] not in now
            if mask is not None and not excluded:
                path = [*tokens, *tree.path_tokens(node)]
                other.follow(path, len(path))
                assert allowed(other) == mask.mask.nonzero().squeeze(1).tolist()
                other.follow(tokens, len(tokens))
        tokens.append(draw.choice(now))
    if tokens[-1] == END:
        jsonschema.validate(json.loads(Tokenizer.load(directory).decode(tokens[len(PROMPT) : -1])), schema)
    else:
        assert len(tokens) == MOST
