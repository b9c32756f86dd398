"""Compiles grammars for a model's vocabulary, and follows answers through them.

A matcher finds the allowed tokens at every node of a draft tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.core.grammar import Grammar, parser_limits, source_of
from cluster.core.tree import ROOT, TokenTree
from workers.sampling.context import AllowedTokens

_MOST_CACHED = 64
"""Most compiled grammars that are kept, unless the rows of one step use more."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or is too complex, or an answer that does not match it."""


class GrammarMatcher:
    """The place of one answer in its grammar.

    What is allowed after some tokens depends on the grammar and these tokens alone. But a matcher that has failed stays
    so, and its limits count what all copies of one compiled grammar have read, drafts included: only a failure of
    `GrammarCompiler.own_matcher` is one of the answer.
    """

    def __init__(
        self, matcher: LLMatcher, prompt_len: int, vocabulary_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        """`matcher` is at its beginning, which is the end of the prompt."""
        self._matcher = matcher
        self._start = self._end = prompt_len
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._forced: list[int] = []
        """Forced tokens after the place that are known. A long literal is not read anew at each step."""

    def follow(self, tokens: Sequence[int], length: int) -> None:
        """Go to the place after the first `length` of `tokens`, prompt included.

        The tokens up to the earlier place are those of the earlier call. Raises `GrammarError`.
        """
        length = max(length, self._start)
        if length < self._end:
            self._matcher.rollback(self._end - length)
            self._end = length
            self._forced = []
        new = [tokens[index] for index in range(self._end, length)]
        taken = self._matcher.try_consume_tokens(new) if new else 0
        self._end += taken
        self._forced = self._forced[taken:] if self._forced[:taken] == new[:taken] else []
        self._check()
        if taken < len(new):
            raise GrammarError("the answer so far does not match the grammar")

    def allowed(self, tree: TokenTree) -> tuple[AllowedTokens | None, ...]:
        """Return the allowed tokens at the place, then at every node of a tree that begins there.

        `None` stands for nodes that the grammar excludes, and for those after the end of the answer: no decision leads
        there. The place stays. Raises `GrammarError`.
        """
        found: list[AllowedTokens | None] = [self._here()]
        found.extend([None] * len(tree))
        for node in self._walk(tree):
            found[node + 1] = self._here()
        self._check()
        return tuple(found)

    def possible(self, tree: TokenTree) -> list[int]:
        """Return the nodes of a tree that the grammar does not exclude, ascending. The place stays."""
        found = {ROOT, *self._walk(tree)}
        ends = [node for node, token in enumerate(tree.tokens) if token in self._eos_token_ids]
        return sorted([*found - {ROOT}, *(node for node in ends if tree.parents[node] in found)])

    def _walk(self, tree: TokenTree) -> Iterator[int]:
        """Go to each node of a tree that the grammar does not exclude, and back at the end.

        Tokens that end the answer are left out, with what follows them.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []
        pending = children.get(ROOT, [])[::-1]
        while pending:
            node = pending.pop()
            while path and path[-1] != tree.parents[node]:
                path.pop()
                self._matcher.rollback(1)
            if tree.tokens[node] in self._eos_token_ids or not self._matcher.try_consume_tokens([tree.tokens[node]]):
                continue
            path.append(node)
            yield node
            pending.extend(children.get(node, [])[::-1])
        if path:
            self._matcher.rollback(len(path))

    def forced(self, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that follow because the grammar allows no other one at each place."""
        if most <= 0 or self._matcher.is_stopped():
            return ()
        if not self._forced:
            self._forced = self._matcher.compute_ff_tokens()
        if self._matcher.is_error():
            return ()
        return tuple(token for token in self._forced[:most] if token < self._vocabulary_size)

    def _here(self) -> AllowedTokens:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        flags = np.unpackbits(bits, count=None, bitorder="little")[: self._vocabulary_size]
        mask = np.zeros(self._vocabulary_size, dtype=np.bool_)
        mask[: len(flags)] = flags
        return AllowedTokens(torch.from_numpy(mask), self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()
            raise GrammarError(f"the grammar is too complex: {reason[0] if reason else 'its limits are reached'}")


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
        self._compiled.move_to_end(grammar)
        return found

    def drop_unused(self, used: Container[Grammar]) -> None:
        """Drop the grammars that were used longest ago, while there are too many, but none of `used`.

        If a step dropped its own, the next step would have to compile them anew, and so might never begin.
        """
        excess = max(0, len(self._compiled) - _MOST_CACHED)
        unused = [grammar for grammar in self._compiled if grammar not in used] if excess else []
        for grammar in unused[:excess]:
            self._compiled.pop(grammar).cancel()

    def matcher(self, grammar: Grammar, prompt_len: int) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer. Waits for the compilation.

        Raises `GrammarError`, which is not kept.
        """
        try:
            compiled = self.compile(grammar).result()
        except GrammarError:
            del self._compiled[grammar]
            raise
        return self._at_start(compiled.deep_copy(), prompt_len)

    def own_matcher(self, grammar: Grammar, prompt_len: int) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer that shares nothing with others, after one has failed.

        Compiles at once. Answers that begin later do not share with the failed one either. Raises `GrammarError`.
        """
        self._compiled.pop(grammar, None)
        return self._at_start(self._compile(grammar), prompt_len)

    def _at_start(self, matcher: LLMatcher, prompt_len: int) -> GrammarMatcher:
        return GrammarMatcher(matcher, prompt_len, self._vocabulary_size, self._eos_token_ids)

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
