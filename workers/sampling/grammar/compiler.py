"""Compiles grammars for a model's vocabulary."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.core.grammar import Grammar, parser_limits, source_of
from workers.sampling.grammar.matcher import GrammarError, GrammarMatcher

_MOST_CACHED = 64
"""Most compiled grammars that are kept."""


class GrammarCompiler:
    """Compiles grammars in a thread, and keeps those that were used last.

    The vocabulary is read at the first grammar. The work and the memory of a compilation are bounded by the library.
    """

    def __init__(self, directory: Path, vocabulary_size: int, eos_token_ids: Sequence[int]) -> None:
        """`directory` is the model's, with its `tokenizer.json`."""
        self._path = directory / "tokenizer.json"
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = list(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Begin to compile a grammar, if that is not done. The result is a matcher to copy, or a `GrammarError`."""
        found = self._compiled.get(grammar)
        if found is None:
            found = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > _MOST_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return found

    def matcher(self, grammar: Grammar, prompt_len: int) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer. Waits for the compilation.

        Raises `GrammarError`, which is not kept.
        """
        try:
            compiled = self.compile(grammar).result()
        except GrammarError:
            del self._compiled[grammar]
            raise
        return GrammarMatcher(compiled.deep_copy(), prompt_len, self._vocabulary_size, self._eos_token_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        try:
            source = source_of(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)) from None
        matcher = LLMatcher(self._vocabulary, source, limits=LLParserLimits(**parser_limits(grammar)), log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def _load(self) -> LLTokenizer:
        eos = self._eos_token_ids or None
        if not self._path.is_file():
            raise GrammarError(f"the model has no {self._path.name}, so its tokens have no text")
        try:
            return LLTokenizer(str(self._path), n_vocab=self._vocabulary_size, eos_token=eos)
        except ValueError:  # the tokenizer has more tokens than the model
            try:
                return LLTokenizer(str(self._path), eos_token=eos)
            except ValueError as error:
                raise GrammarError(f"the model's {self._path.name} cannot be used: {error}") from None
