"""The texts that the answers of stored sequences must not contain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.core.errors import ConfigurationError
from cluster.core.verification import VerifyRow
from workers.sampling.allowed_tokens import AllowedTokens
from workers.sampling.bad_texts import BadTexts, TokenTexts
from workers.sampling.context import Branch
from workers.verify.sequence_state import SequenceState

Allowed = tuple[AllowedTokens | None, ...]


class ForbiddenTexts:
    """Excludes, at the decisions of rows, the tokens that complete a text which the sequence forbids.

    The vocabulary is read at the first such row.
    """

    def __init__(self, directory: Path | None, vocabulary_size: int) -> None:
        """`directory` is the model's, with its `tokenizer.json`; `None` refuses texts."""
        self._directory = directory
        self._vocabulary_size = vocabulary_size
        self._tokens: TokenTexts | None = None

    def without(self, row: VerifyRow, sequence: SequenceState, allowed: Allowed) -> Allowed:
        """Return what remains of `allowed` at the root of the row's tree and at each node.

        Raises `ConfigurationError` if the texts of the model's tokens are not known.
        """
        start = sequence.start
        if not row.decide or not start.sampling.bad_texts:
            return allowed
        if sequence.bad_texts is None:
            sequence.bad_texts = BadTexts(self._texts(), start.sampling.bad_texts)
        stem = Branch(sequence.tokens, row.pending)
        answers: list[Sequence[int]] = [stem]
        answers += [Branch(stem, row.tree.path_tokens(node)) for node in range(len(row.tree))]
        return tuple(
            _without(sequence.bad_texts, answer, start.prompt_len, before)
            for answer, before in zip(answers, allowed or [_ALL] * len(answers), strict=True)
        )

    def _texts(self) -> TokenTexts:
        if self._tokens is None:
            if self._directory is None:
                raise ConfigurationError("this target has no tokenizer")
            self._tokens = TokenTexts.load(self._directory, self._vocabulary_size)
        return self._tokens


class _AllTokens:
    """Stands for a decision that nothing else restricts."""


_ALL = _AllTokens()


def _without(
    texts: BadTexts, answer: Sequence[int], begin: int, before: AllowedTokens | _AllTokens | None
) -> AllowedTokens | None:
    """Return the tokens of `before` that complete no text; `None` stays so, because no decision leads there."""
    if before is None:
        return None
    mask = texts.allowed(answer, begin)
    if isinstance(before, _AllTokens):
        return AllowedTokens(mask)
    return AllowedTokens(mask & before.mask, before.is_complete, before.by_grammar)
