"""Whether a text matches a grammar, decided byte by byte without a model's vocabulary."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer

from cluster.core.grammar import Grammar, source_of


def accepts(grammar: Grammar, text: str) -> bool:
    """Return whether the whole text matches the grammar."""
    matcher = LLMatcher(LLTokenizer("byte"), source_of(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
