"""An independent draft model: a small language model that guesses with the target's own noise.

It takes each token as the target would, by `decide` with the sequence's parameters, seed and position,
so that wherever the two distributions are alike, so are the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig

from cluster.core.config import DraftSection, TargetSection
from cluster.core.errors import ConfigurationError, KvPoolExhausted
from cluster.core.ids import SequenceId
from cluster.core.tree import TokenTree
from cluster.core.types import DraftRow, Proposal, RowFault, SequenceStart
from workers.draft.method import register
from workers.draft.sessions import Session, Sessions
from workers.model.loaded import LoadedModel
from workers.model.loading import load_model
from workers.model.pool import KvPool
from workers.model.runner import ForwardRow, ModelRunner
from workers.model.tables import BlockTable
from workers.sampling.context import Branch, DecisionContext
from workers.sampling.decide import Undecidable, decide

MOST_FORWARD_TOKENS = 512
"""Tokens in one forward pass: a long prompt goes in chunks, beside the other rows' guesses."""


class StoredSession(Session):
    """Committed tokens, and the tokens whose keys and values the pool holds, guessed ones included."""

    __slots__ = ("_agreed_len", "stored", "table")

    def __init__(self, start: SequenceStart, table: BlockTable) -> None:
        super().__init__(start)
        self.table = table
        self.stored: list[int] = []
        """As many as `table.stored_len`."""
        self._agreed_len = 0

    def replace(self, known_len: int, new_tokens: Sequence[int]) -> None:
        """See `Session`."""
        super().replace(known_len, new_tokens)
        self._agreed_len = min(self._agreed_len, known_len)

    def agreed_len(self) -> int:
        """How many leading tokens are both stored and committed; looks at each only once."""
        limit = min(len(self.stored), len(self.tokens))
        agreed = min(self._agreed_len, limit)
        while agreed < limit and self.stored[agreed] == self.tokens[agreed]:
            agreed += 1
        self._agreed_len = agreed
        return agreed


class _Chain:
    """A row at work: what it has guessed, and the tokens that must go through the model next."""

    __slots__ = ("guesses", "session", "todo", "wanted")

    def __init__(self, session: StoredSession, wanted: int) -> None:
        self.session = session
        self.wanted = wanted
        """Tokens to guess."""
        self.guesses: list[int] = []
        self.todo: list[int] = session.tokens[len(session.stored) :]

    def context(self) -> DecisionContext:
        """Of the next guess."""
        start = self.session.start
        return DecisionContext(start.sampling, Branch(self.session.tokens, self.guesses), start.prompt_len)

    def add(self, guess: int | None) -> None:
        """Take the next guess; `None` ends the chain."""
        if guess is None:
            return
        self.guesses.append(guess)
        if len(self.guesses) < self.wanted:
            self.todo = [guess]


class ModelDrafter:
    """Chains from a draft model, all rows together: a forward pass per depth.

    `pool` must rewind. Keys and values of what was guessed stay until the next row tells how much of it was committed.
    When the pool is full, sequences that were not asked for lately lose theirs (they are computed
    again when asked for); a row for which that is not enough gets an empty tree.
    """

    def __init__(
        self, model: LoadedModel, pool: KvPool, section: DraftSection, most_forward_tokens: int = MOST_FORWARD_TOKENS
    ) -> None:
        self._model = model
        self._pool = pool
        self._section = section
        self._most_forward_tokens = most_forward_tokens
        self._runner = ModelRunner(model, pool)
        self._sessions = Sessions(
            lambda start: StoredSession(start, pool.new_table()), self._forget_stored, model.vocabulary_size
        )

    def warm_up(self) -> None:
        """Pay now for what the first proposals would wait for."""
        self._runner.warm_up()

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """See `DraftMethod`."""
        applied = [self._sessions.apply(row) for row in rows]
        in_use = {row.sequence_id for row in rows}
        chains: dict[SequenceId, _Chain] = {}
        try:
            for row, session in zip(rows, applied, strict=True):
                chain = None if isinstance(session, RowFault) else self._begin(row, session, in_use)
                if chain is not None:
                    chains[row.sequence_id] = chain
            self._grow(list(chains.values()))
        finally:
            # Whatever ended the work, room that was only reserved goes back.
            for chain in chains.values():
                self._pool.truncate(chain.session.table, len(chain.session.stored))
        return tuple(
            Proposal(row.sequence_id, row.base_len, fault=session)
            if isinstance(session, RowFault)
            else Proposal(row.sequence_id, row.base_len, _tree(chains.get(row.sequence_id)))
            for row, session in zip(rows, applied, strict=True)
        )

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """See `DraftMethod`."""
        self._sessions.release(sequence_ids)

    def close(self) -> None:
        """See `DraftMethod`."""
        self._sessions.clear()

    def _begin(self, row: DraftRow, session: StoredSession, in_use: set[SequenceId]) -> _Chain | None:
        """Keep what is still right of the stored tokens and reserve all that the chain will take.

        `None` where nothing is wanted, or nothing can be had.
        """
        wanted = min(
            row.budget.max_nodes,
            row.budget.max_depth,
            self._section.max_nodes,
            self._section.max_depth,
            self._model.max_context_len - row.base_len + 1,  # the last guess is not run through the model
        )
        if wanted < 1:
            return None
        # The last committed token is always run again: its logits are the first guess.
        self._keep_stored(session, min(session.agreed_len(), row.base_len - 1))
        if not self._reserve(session, row.base_len + wanted - 1, in_use):
            self._forget_stored(session)
            return None
        return _Chain(session, wanted)

    def _reserve(self, session: StoredSession, length: int, in_use: set[SequenceId]) -> bool:
        """Make room for `length` tokens, at the cost of sequences that are not in use."""
        others = (other for other in self._sessions.least_recent(without=in_use) if other.table.held)
        while True:
            try:
                self._pool.reserve(session.table, length)
            except KvPoolExhausted:
                other = next(others, None)
                if other is None:
                    return False
                self._forget_stored(other)
            else:
                return True

    def _grow(self, chains: Sequence[_Chain]) -> None:
        """Run the model until every chain is as long as wanted."""
        while working := [chain for chain in chains if chain.todo]:
            # Short ones first: a chunk of a long prompt takes the room that the others leave.
            room = self._most_forward_tokens
            parts: list[tuple[_Chain, ForwardRow]] = []
            for chain in sorted(working, key=lambda chain: len(chain.todo)):
                tokens = tuple(chain.todo[:room])
                if tokens:
                    select = (len(tokens) - 1,) if len(tokens) == len(chain.todo) else ()
                    parts.append((chain, ForwardRow(chain.session.table, tokens, select=select)))
                    room -= len(tokens)
            self._advance(parts)

    def _advance(self, parts: Sequence[tuple[_Chain, ForwardRow]]) -> None:
        """One forward pass, and one guess for each chain whose tokens have all gone through."""
        for _, row in parts:
            # `_begin` reserved it for all chains at once and `keep` gave it back, so there is room.
            self._pool.reserve(row.table, row.end)
        logits = self._runner.forward([row for _, row in parts])  # [guesses, vocabulary]
        ready: list[_Chain] = []
        for chain, row in parts:
            self._runner.keep(row)
            chain.session.stored.extend(row.tokens)
            chain.todo = chain.todo[len(row.tokens) :]
            if row.select:
                ready.append(chain)
        guesses = _decide_where_possible(logits, [chain.context() for chain in ready])
        for chain, guess in zip(ready, guesses, strict=True):
            chain.add(guess)

    def _keep_stored(self, session: StoredSession, length: int) -> None:
        self._pool.truncate(session.table, length)
        del session.stored[length:]

    def _forget_stored(self, session: StoredSession) -> None:
        self._keep_stored(session, 0)


def _decide_where_possible(logits: torch.Tensor, contexts: Sequence[DecisionContext]) -> list[int | None]:
    """`decide`, with `None` for rows whose logits hold no number to decide by."""
    try:
        return list(decide(logits, contexts))
    except Undecidable as hopeless:
        guesses: list[int | None] = [None] * len(contexts)
        sound = [row for row in range(len(contexts)) if row not in hopeless.rows]
        for row, guess in zip(sound, decide(logits[sound], [contexts[row] for row in sound]), strict=True):
            guesses[row] = guess
        return guesses


def _tree(chain: _Chain | None) -> TokenTree:
    return TokenTree() if chain is None else TokenTree.chain(chain.guesses)


def check_vocabularies(draft: LoadedModel, draft_directory: Path, target_section: TargetSection) -> None:
    """Raise `ConfigurationError` unless the draft has as many tokens as the target, or at least its tokenizer.

    Models of one family pad their embeddings differently: sizes may differ where the tokenizers are the same, and
    the coordinator drops guesses beyond the target's. A target whose directory is not on this machine cannot be
    looked at, and is not.
    """
    directory = Path(target_section.path)
    if not (directory / "config.json").is_file():
        return
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False).get_text_config()
    if draft.vocabulary_size != config.vocab_size and not _same_tokenizer(draft_directory, directory):
        raise ConfigurationError(
            f"draft.model.path: {draft.name!r} has a vocabulary of {draft.vocabulary_size} tokens and the target "
            f"{directory.name!r} one of {config.vocab_size}; a draft must share the target's tokenizer"
        )


def _same_tokenizer(one: Path, other: Path) -> bool:
    files = [directory / "tokenizer.json" for directory in (one, other)]
    if not all(file.is_file() for file in files):
        return False
    first, second = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
    return bool(first == second)


@register("model")
def create_model(section: DraftSection, target_section: TargetSection) -> ModelDrafter:
    """The method `model`: loads `section.model`.

    Raises `ConfigurationError` when there is none or its vocabulary is not the target's, `ModelLoadError`.
    """
    if section.model is None:
        raise ConfigurationError("draft.model: method 'model' needs draft.model.path")
    model = load_model(section.model)
    check_vocabularies(model, Path(section.model.path), target_section)
    drafter = ModelDrafter(model, KvPool(model, section.kv, rewinds=True), section)
    drafter.warm_up()
    return drafter
