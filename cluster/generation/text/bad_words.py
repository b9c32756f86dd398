"""Words that an answer must not contain: texts that the target looks for, or token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core import bounds
from cluster.core.request import GenerationRequest
from cluster.generation.text.tokenizer import Tokenizer


def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that spell the words, alone and after a space where that is another end.

    Raises `InvalidRequest` (`bad_words`) for a word of too many tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        alone, spaced = (tokenizer.encode_answer(before + word.lstrip()) for before in ("", " "))
        bounds.count("bad_words", alone, 1, bounds.MAX_BAD_WORD_TOKENS, "tokens")
        found[alone] = None
        if spaced[-len(alone) :] != alone:
            found[spaced] = None
    return tuple(found)


def without_bad_words(request: GenerationRequest, tokenizer: Tokenizer, words: Sequence[str]) -> GenerationRequest:
    """Return the request with the words that the answer must not contain. Raises `InvalidRequest` (`bad_words`).

    The target knows the texts of tokens that a `tokenizer.json` has. For other vocabularies, the words become the token
    sequences that spell them.
    """
    if not words:
        return request
    sampling = request.sampling
    if tokenizer.has_json_vocabulary:
        texts = (*sampling.bad_texts, *words)
        bounds.count("bad_words", texts, 0, bounds.MAX_BAD_TEXTS, "texts")
        return replace(request, sampling=replace(sampling, bad_texts=texts))
    sequences = (*sampling.bad_words, *encode_bad_words(tokenizer, words))
    bounds.count("bad_words", sequences, 0, bounds.MAX_BAD_WORDS, "token sequences")
    return replace(request, sampling=replace(sampling, bad_words=sequences))
