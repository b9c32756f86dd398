"""Words that an answer must not contain, as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core import bounds
from cluster.core.errors import InvalidRequest
from cluster.core.request import GenerationRequest
from cluster.generation.text.tokenizer import Tokenizer

MAX_BAD_WORD_CHARS = 256


def check_bad_words(words: Sequence[str]) -> tuple[str, ...]:
    """Return words that an answer must not contain. Raises `InvalidRequest` (`bad_words`)."""
    bounds.count("bad_words", words, 0, bounds.MAX_BAD_WORDS // 2, "words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest("bad_words", word, f"between 1 and {MAX_BAD_WORD_CHARS} characters, not all spaces")
    return tuple(words)


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell the words: alone, and after a space where that is one other token.

    Raises `InvalidRequest` (`bad_words`) for a word of too many tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone = tokenizer.encode_answer(word.lstrip())
        spaced = tokenizer.encode_answer(" " + word.lstrip())
        bounds.count("bad_words", alone, 1, bounds.MAX_BAD_WORD_TOKENS, "tokens")
        found[alone] = None
        if len(spaced) == len(alone) and spaced[0] != alone[0]:
            found[spaced] = None
    return tuple(found)


def without_bad_words(request: GenerationRequest, tokenizer: Tokenizer, words: Sequence[str]) -> GenerationRequest:
    """Return the request with the token sequences of words that the answer must not contain."""
    if not words:
        return request
    found = (*request.sampling.bad_words, *encode_bad_words(tokenizer, words))
    return replace(request, sampling=replace(request.sampling, bad_words=found))
