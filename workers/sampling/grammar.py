"""Compiles grammars for a model's vocabulary, and follows answers through them.

A matcher finds the allowed tokens at every node of a draft tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.core.grammar import Grammar, parser_limits, source_of
from cluster.core.tree import ROOT, TokenTree
from workers.sampling.allowed_tokens import AllowedTokens

_MOST_CACHED = 64
"""Most compiled grammars that are kept, unless the rows of one step use more."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled or is too complex, or an answer that does not match it."""


class GrammarLimitError(GrammarError):
    """A matcher has reached a limit of its work. Another one may get further, see `Attempt`."""


class Attempt(IntEnum):
    """What follows an answer through its grammar. When a matcher has reached a limit, the next kind takes its place.

    The limits count what all copies of one compiled grammar have read, drafts included, and all copies end together. So
    only a failure of the last kind, before it has served a row, is one of the answer.
    """

    SHARED = 0
    """A copy of the compiled grammar."""
    SHARED_AGAIN = 1
    """A copy of the grammar compiled anew, once for all answers."""
    OWN = 2
    """The grammar compiled for this answer alone."""
    WITHOUT_DRAFTS = 3
    """The grammar compiled for this answer alone, and the answer has no drafts."""


class GrammarMatcher:
    """The place of one answer in its grammar.

    What is allowed after some tokens depends on the grammar and these tokens alone. But a matcher that has reached a
    limit is broken: it finds nothing any more.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        prompt_len: int,
        vocabulary_size: int,
        eos_token_ids: Sequence[int],
        *,
        attempt: Attempt,
        origin: Future[LLMatcher],
    ) -> None:
        """`matcher` is at its beginning, which is the end of the prompt. `origin` is the compilation that made it."""
        self.attempt = attempt
        self.origin = origin
        self.has_served = False
        """Whether it has found what is allowed for a row."""
        self._matcher = matcher
        self._start = self._end = prompt_len
        self._vocabulary_size = vocabulary_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._forced: list[int] = []
        """Forced tokens after the place that are known. A long literal is not read anew at each step."""
        self._root: AllowedTokens | None = None
        """What is allowed at the place, once it was asked for: the library takes longest to find it."""

    @property
    def is_broken(self) -> bool:
        """Whether it has reached a limit."""
        return bool(self._matcher.is_error())

    def restart(self) -> None:
        """Go back to the beginning of the answer."""
        if self._end > self._start:
            self._matcher.rollback(self._end - self._start)
        self._end = self._start
        self._forced, self._root = [], None

    def follow(self, tokens: Sequence[int], length: int) -> None:
        """Go to the place after the first `length` of `tokens`, prompt included.

        The tokens up to the earlier place are those of the earlier call. Raises `GrammarError` if they do not match the
        grammar, and `GrammarLimitError`.
        """
        length = max(length, self._start)
        if length != self._end:
            self._root = None
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
            self._here()  # shows whether a limit has refused the token: until then the library reports no error
            raise GrammarError("the answer so far does not match the grammar")

    def allowed(self, tree: TokenTree) -> tuple[AllowedTokens | None, ...]:
        """Return the allowed tokens at the place, then at every node of a tree that begins there.

        `None` stands for nodes that the grammar excludes, and for those after the end of the answer: no decision leads
        there. Returns those at the place alone if a limit is reached in the tree. The place stays. Raises
        `GrammarLimitError` if the limit is reached before.
        """
        found: list[AllowedTokens | None] = [self._at_place()]
        found.extend([None] * len(tree))
        try:
            for node in self._walk(tree, found):
                found[node + 1] = self._here()
        except GrammarLimitError:
            return (found[0],)
        return tuple(found)

    def allowed_after(self, tokens: Sequence[int]) -> AllowedTokens:
        """Return the allowed tokens after tokens that `forced` returned. The place stays. Raises `GrammarError`."""
        if not tokens:
            return self._at_place()
        taken = self._matcher.try_consume_tokens(list(tokens))
        try:
            if taken < len(tokens):
                raise GrammarLimitError("the grammar is too complex: a limit refuses a forced token")
            return self._here()
        finally:
            if taken:
                self._matcher.rollback(taken)

    def possible(self, tree: TokenTree) -> list[int]:
        """Return the nodes of a tree that the grammar does not exclude, ascending. The place stays."""
        found = {ROOT, *self._walk(tree)}
        ends = [node for node, token in enumerate(tree.tokens) if token in self._eos_token_ids]
        return sorted([*found - {ROOT}, *(node for node in ends if tree.parents[node] in found)])

    def _walk(self, tree: TokenTree, allowed: Sequence[AllowedTokens | None] = ()) -> Iterator[int]:
        """Go to each node of a tree that the grammar does not exclude, and back at the end.

        Tokens that end the answer are left out, with what follows them. `allowed` is what is allowed at the place and
        at each node; the entries of nodes that were yielded are set. With it, a token that is allowed and refused all
        the same raises `GrammarLimitError`: where a limit is reached, the library refuses tokens before it reports an
        error. Without it, such a token is left out.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(tree.parents):
            children.setdefault(parent, []).append(node)
        path: list[int] = []
        pending = children.get(ROOT, [])[::-1]
        try:
            while pending:
                node = pending.pop()
                token, parent = tree.tokens[node], tree.parents[node]
                while path and path[-1] != parent:
                    path.pop()
                    self._matcher.rollback(1)
                known = allowed[parent + 1] if allowed else None
                if token in self._eos_token_ids or (known is not None and not known.permits(token)):
                    continue
                if not self._matcher.try_consume_tokens([token]):
                    if known is not None:
                        raise GrammarLimitError("the grammar is too complex: a limit refuses an allowed token")
                    continue
                path.append(node)
                yield node
                pending.extend(children.get(node, [])[::-1])
        finally:
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

    def _at_place(self) -> AllowedTokens:
        if self._root is None:
            self._root = self._here()
        return self._root

    def _here(self) -> AllowedTokens:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return AllowedTokens.of_grammar(bits, self._vocabulary_size, self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().splitlines()
            raise GrammarLimitError(f"the grammar is too complex: {reason[0] if reason else 'its limits are reached'}")


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
        self._compiled: OrderedDict[tuple[Grammar, bool], Future[LLMatcher]] = OrderedDict()
        """Compilations by grammar, and by whether they are for one answer alone, whose matcher takes them."""

    def compile(self, grammar: Grammar, *, own: bool = False) -> Future[LLMatcher]:
        """Begin to compile a grammar, if that is not done. The result is a matcher to copy, or a `GrammarError`.

        With `own`, the first call of `matcher` for one answer alone takes the result.
        """
        key = grammar, own
        found = self._compiled.get(key)
        if found is None:
            found = self._compiled[key] = self._thread.submit(self._compile, grammar)
        self._compiled.move_to_end(key)
        return found

    def forget(self, grammar: Grammar, matcher: GrammarMatcher) -> None:
        """Compile a grammar anew for the next answers, unless that was begun since this matcher was made."""
        if self._compiled.get((grammar, False)) is matcher.origin:
            del self._compiled[grammar, False]

    def drop_unused(self, used: Container[Future[LLMatcher]]) -> None:
        """Drop the compilations that were used longest ago, while there are too many, but none of `used`.

        If a step dropped its own, the next step would have to compile them anew, and so might never begin.
        """
        excess = max(0, len(self._compiled) - _MOST_CACHED)
        unused = [key for key, compiled in self._compiled.items() if compiled not in used] if excess else []
        for key in unused[:excess]:
            self._compiled.pop(key).cancel()

    def matcher(self, grammar: Grammar, prompt_len: int, attempt: Attempt = Attempt.SHARED) -> GrammarMatcher:
        """Return a matcher at the beginning of an answer. Waits for the compilation.

        Raises `GrammarError`, which is not kept.
        """
        own = attempt >= Attempt.OWN
        origin = self.compile(grammar, own=own)
        try:
            compiled = origin.result()
        except GrammarError:
            del self._compiled[grammar, own]
            raise
        if own:
            del self._compiled[grammar, own]
        return GrammarMatcher(
            compiled if own else compiled.deep_copy(),
            prompt_len,
            self._vocabulary_size,
            self._eos_token_ids,
            attempt=attempt,
            origin=origin,
        )

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        try:
            source = source_of(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(str(error)) from None
        matcher = LLMatcher(self._vocabulary, source, limits=LLParserLimits(**parser_limits()), log_level=0)
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
