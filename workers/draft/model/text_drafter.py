"""Drafts by text: a draft model whose tokenizer is not the target's reads and continues the text of a sequence.

The committed tokens become text, and the draft model's tokenizer encodes it. The text of the draft goes back through
the target's tokenizer, together with the last committed text, so that a word across the boundary is spelled as the
target spells it. Only tokens that follow the committed ones are proposed. The draft model drafts greedily: noise that
belongs to a token of one vocabulary says nothing of another.
"""

from __future__ import annotations

import codecs
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unicodedata import combining

from cluster.core.bounds import MAX_TOKEN_ID
from cluster.core.config.draft_section import DraftSection
from cluster.core.drafting import DraftBudget, DraftRow, NextTokens, Proposal, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.ports import DraftMethod
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import ROOT, TokenTree
from workers.draft.common.idle_work import IdleWork
from workers.draft.common.sessions import DraftingSession, Sessions
from workers.model.text_tokenizer import TextTokenizer

_WINDOW = 16
"""Tokens before the end of the committed text that are encoded again with what follows."""
_ANCHORS = ("\n", "a")
"""Texts before a continuation whose committed text the tokenizer would join with it."""
_MOST_RATIO = 2.0
"""Most tokens of the draft model that are drafted for one token of the target."""
_MOST_NODES = 256
"""Most nodes of a tree of the draft model."""
_MOST_DEPTH = 64
"""Most depth of a tree of the draft model."""


@dataclass(frozen=True, slots=True)
class Tokenizers:
    """The tokenizers of a target and of its draft model, and what bounds their tokens."""

    target: TextTokenizer
    draft: TextTokenizer
    target_size: int
    """Tokens of the target's vocabulary."""
    draft_ends: tuple[int, ...] = ()
    """Tokens with which the draft model ends a text."""
    draft_size: int = MAX_TOKEN_ID + 1
    """Tokens of the draft model's vocabulary. It is not shown what its tokenizer spells with others."""

    def drafted(self, text: str) -> tuple[list[int], list[int]]:
        """The draft model's tokens of a text, and where each of them ends in it, in bytes."""
        pairs = [
            (token, end)
            for token, end in zip(*self.draft.encode_with_ends(text), strict=True)
            if token < self.draft_size
        ]
        return [token for token, _ in pairs], [end for _, end in pairs]


class TextSession(DraftingSession):
    """Committed tokens, their text, and the draft model's tokens of that text."""

    __slots__ = (
        "_draft_ends",
        "_ends",
        "_is_read",
        "_known",
        "_pending",
        "_tokenizers",
        "draft_tokens",
        "held_len",
        "text",
    )

    def __init__(self, start: SequenceStart, tokenizers: Tokenizers) -> None:
        super().__init__(start)
        self._tokenizers = tokenizers
        self.text = bytearray()
        """The text of all tokens in UTF-8, without the bytes of an incomplete character at its end."""
        self._ends: list[int] = []
        """Length of `text` after each token."""
        self._pending: list[bytes] = []
        """The bytes of an incomplete character after each token."""
        self._known = 0
        """How many bytes at the beginning of `text` are those that `draft_tokens` were made of."""
        self._is_read = False
        """Whether `draft_tokens` are those of `text`."""
        self.draft_tokens: list[int] = []
        """The draft model's tokens of `text`, with those that it reads before every text."""
        self._draft_ends: list[int] = []
        """Where each of `draft_tokens` ends in `text`."""
        self.held_len: int | None = None
        """How many of `draft_tokens` the draft model's drafter holds; `None` if it does not know the sequence."""

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character at the end."""
        return self._pending[-1] if self._pending else b""

    @property
    def end_token(self) -> int | None:
        """The token that ends the answer, the last one that the text has, else the first; `None` if none does."""
        ends = self.start.sampling.end_token_ids
        return next((token for token in reversed(self.tokens) if token in ends), ends[0]) if ends else None

    @property
    def ratio(self) -> float:
        """Tokens of the draft model for one token of the target."""
        return min(_MOST_RATIO, max(1 / _MOST_RATIO, len(self.draft_tokens) / max(1, len(self.tokens))))

    def remove(self, length: int) -> None:
        super().remove(length)
        del self._ends[length:], self._pending[length:]
        del self.text[self._ends[-1] if self._ends else 0 :]
        self._known = min(self._known, len(self.text))
        self._is_read = False

    def append(self, tokens: Sequence[int]) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.setstate((self.pending, 0))
        target = self._tokenizers.target
        self._is_read = self._is_read and not tokens
        for token in tokens:
            position = len(self.tokens)
            is_opening = target.opening[position : position + 1] == (token,)
            previous = self.tokens[-1] if self.tokens else None
            spelled = b"" if is_opening else target.bytes_after(previous, token)
            self.text += decoder.decode(spelled).encode()
            self.tokens.append(token)
            self._ends.append(len(self.text))
            self._pending.append(decoder.getstate()[0])

    def read(self) -> None:
        """Bring `draft_tokens` up to date with `text`. Only the end of a known text is encoded again."""
        if not self._is_read:
            self.draft_tokens, self._draft_ends = self._encoded()
            self._known, self._is_read = len(self.text), True

    def _encoded(self) -> tuple[list[int], list[int]]:
        """The draft model's tokens of `text`, and where each of them ends."""
        draft, ends = self._tokenizers.draft, self._draft_ends
        kept, opening = bisect_right(ends, self._known), len(draft.opening)
        window = _WINDOW
        while (first := kept - window) > opening:
            begin = ends[first - 1]
            if not _is_inside_character(self.text, begin):
                found = self._joined(first, kept, begin)
                if found is not None:
                    return found
            window *= 2
        self._forget_held(0)
        whole, whole_ends = self._tokenizers.drafted(self.text.decode())
        return [*draft.opening, *whole], [*([0] * opening), *whole_ends]

    def _joined(self, first: int, kept: int, begin: int) -> tuple[list[int], list[int]] | None:
        """The known tokens up to one that the text from `begin` on gives as well, then those of that text.

        `begin` is where token `first` begins, and the tokens below `kept` are of an unchanged text. `None` if no token
        of them is found again, behind the first one, which may be spelled otherwise where a text begins. Tokens of
        characters that the tokenizer composes do not count, nor do those that begin with a combining mark: a mark that
        follows composes others, and is ordered before marks of a higher class (Unicode, section 3.11).
        """
        tokens, ends = self.draft_tokens, self._draft_ends
        again, again_ends = self._tokenizers.drafted(self.text[begin:].decode())
        places = {(begin + end, token): place for place, (end, token) in enumerate(zip(again_ends, again, strict=True))}
        for index in range(kept - 1, first, -1):
            place = places.get((ends[index], tokens[index]))
            if place and self._is_spelled(tokens[index], ends[index]):
                self._forget_held(index + 1)
                joined = tokens[: index + 1] + again[place + 1 :]
                return joined, ends[: index + 1] + [begin + end for end in again_ends[place + 1 :]]
        return None

    def _is_spelled(self, token: int, end: int) -> bool:
        """Whether `text` has the bytes of a draft model's token before `end`, from a character on that is no mark."""
        spelled = self._tokenizers.draft.bytes_of(token)
        begin = end - len(spelled)
        if begin < 0 or self.text[begin:end] != spelled or _is_inside_character(self.text, begin):
            return False
        first = self.text[begin : begin + 4].decode(errors="ignore")[:1]
        return not combining(first or "\0")

    def _forget_held(self, length: int) -> None:
        """Note that tokens of the draft model from number `length` on are replaced."""
        self.held_len = None if self.held_len is None else min(self.held_len, length)

    def continued(self, texts: Sequence[bytes]) -> list[tuple[int, ...] | None]:
        """The target's tokens of texts that follow the committed tokens; `None` where no tokens fit.

        A text begins with the pending bytes, if there are any.
        """
        target, pending = self._tokenizers.target, len(self.pending)
        first = max(0, len(self.tokens) - _WINDOW)
        while first > 0 and self._pending[first - 1]:
            first -= 1
        begin = self._ends[first - 1] if first else 0
        before = bytes(self.text[begin:])
        found = _tokens_after(target, before, texts, pending)
        for anchor in () if pending else _ANCHORS:
            missing = [index for index, tokens in enumerate(found) if tokens is None]
            if missing:
                again = _tokens_after(target, anchor.encode(), [texts[index] for index in missing], 0)
                for index, tokens in zip(missing, again, strict=True):
                    found[index] = tokens
        return found


def _is_inside_character(text: bytes | bytearray, at: int) -> bool:
    return at < len(text) and text[at] & 0xC0 == 0x80


def _tokens_after(
    tokenizer: TextTokenizer, before: bytes, texts: Sequence[bytes], pending: int
) -> list[tuple[int, ...] | None]:
    """The tokens that spell each text without its first `pending` bytes, encoded together with the text `before`.

    `None` where a token spells bytes of both. All are whole characters.
    """
    wholes = [before + text for text in texts]
    found: list[tuple[int, ...] | None] = []
    for tokens, whole in zip(tokenizer.encode([whole.decode() for whole in wholes]), wholes, strict=True):
        ends = tokenizer.ends(tokens, whole)
        boundary = len(before) + pending
        if ends is None:
            found.append(None)
            continue
        place = bisect_right(ends, boundary)  # behind the last token that ends there
        is_boundary = ends[place - 1] == boundary if place else boundary == 0
        found.append(tokens[place:] if is_boundary else None)
    return found


@dataclass(frozen=True, slots=True)
class _Path:
    """A path of the draft model's tree, as text."""

    nodes: tuple[int, ...]
    """The nodes whose text counts."""
    ends: tuple[int, ...]
    """Length of the text after each node, in bytes."""
    text: bytes
    """Whole characters; those of the last nodes may be missing."""
    is_end: bool
    """Whether the draft model ends the text there."""


class TextDrafter:
    """A `DraftMethod` over another one, whose tokens are those of a draft model with another tokenizer."""

    def __init__(self, inner: DraftMethod, tokenizers: Tokenizers) -> None:
        """`inner` drafts in the draft model's tokens, with the settings of `inner_section`."""
        self._inner = inner
        self._tokenizers = tokenizers
        self._sampling = SamplingParameters(temperature=0.0, end_token_ids=tokenizers.draft_ends)
        self._sessions = Sessions(lambda start: TextSession(start, tokenizers), vocabulary_size=tokenizers.target_size)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        proposals: dict[SequenceId, Proposal] = {}
        sessions: dict[SequenceId, tuple[DraftRow, TextSession]] = {}
        for row, session in self._sessions.update(rows, proposals):
            proposals[row.sequence_id] = Proposal(row.sequence_id, row.base_len)
            session.read()
            if session.draft_tokens:
                sessions[row.sequence_id] = row, session
        for drafted in self._drafted(sessions):
            row, session = sessions[drafted.sequence_id]
            proposals[row.sequence_id] = _in_target_tokens(row, session, drafted, self._tokenizers)
        return tuple(proposals[row.sequence_id] for row in rows)

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self._sessions.release(sequence_ids)
        self._inner.release(sequence_ids)

    def catch_up(self, sequence_ids: Sequence[SequenceId]) -> bool:
        """Compute some committed tokens of these sequences; see `IdleWork`."""
        return isinstance(self._inner, IdleWork) and self._inner.catch_up(sequence_ids)

    def run_ahead(self) -> bool:
        """Do one piece of work that makes the next proposals ready sooner; see `IdleWork`."""
        return isinstance(self._inner, IdleWork) and self._inner.run_ahead()

    def _drafted(self, sessions: dict[SequenceId, tuple[DraftRow, TextSession]]) -> Iterator[Proposal]:
        """Let the draft model draft for the sequences. Yields the proposals without a fault."""
        if not sessions:
            return
        lost: list[DraftRow] = []
        for proposal in self._inner.propose([self._inner_row(row, session) for row, session in sessions.values()]):
            row, session = sessions[proposal.sequence_id]
            if proposal.fault is None:
                session.held_len = len(session.draft_tokens)
                yield proposal
            else:
                session.held_len = None
                if proposal.fault.code is RowFaultCode.OUT_OF_SYNC:
                    lost.append(self._inner_row(row, session))
        for proposal in self._inner.propose(lost) if lost else ():
            if proposal.fault is None:
                session = sessions[proposal.sequence_id][1]
                session.held_len = len(session.draft_tokens)
                yield proposal

    def _inner_row(self, row: DraftRow, session: TextSession) -> DraftRow:
        """The row of a sequence in the draft model's tokens."""
        tokens, budget, ratio = session.draft_tokens, row.budget, session.ratio
        inner = DraftBudget(math.ceil(budget.max_nodes * ratio), math.ceil(budget.max_depth * ratio))
        if session.held_len is None:
            start = SequenceStart(1, self._sampling, session.start.cache_salt)
            return DraftRow(row.sequence_id, len(tokens), tuple(tokens), inner, start)
        return DraftRow(row.sequence_id, len(tokens), tuple(tokens[session.held_len :]), inner)


def inner_section(draft: DraftSection) -> DraftSection:
    """The common settings for the draft model's own trees, which may need more tokens for the same text."""
    nodes = min(_MOST_NODES, math.ceil(draft.max_nodes * _MOST_RATIO))
    depth = min(_MOST_DEPTH, math.ceil(draft.max_depth * _MOST_RATIO))
    return draft.model_copy(update={"max_nodes": nodes, "max_depth": depth})


def _in_target_tokens(row: DraftRow, session: TextSession, drafted: Proposal, tokenizers: Tokenizers) -> Proposal:
    """The proposal with the text of a draft model's tree, in the target's tokens, cut to the row's budget."""
    paths = list(_paths(drafted.tree, session, tokenizers))
    builder = _TreeBuilder(drafted, row.budget.max_depth, row.next_tokens)
    for path, tokens in zip(paths, session.continued([path.text for path in paths]), strict=True):
        if tokens is None:
            continue
        fitting = next((index for index, token in enumerate(tokens) if token >= tokenizers.target_size), len(tokens))
        at = len(session.pending)
        spelled = []
        for token in tokens[:fitting]:
            at += len(tokenizers.target.bytes_of(token))
            spelled.append((token, path.nodes[min(bisect_left(path.ends, at), len(path.nodes) - 1)]))
        end = session.end_token if path.is_end and fitting == len(tokens) else None
        if end is not None:
            spelled.append((end, path.nodes[-1]))
        builder.add(spelled)
    return builder.build(row)


def _paths(tree: TokenTree, session: TextSession, tokenizers: Tokenizers) -> Iterator[_Path]:
    """The paths of a draft model's tree to its leaves, up to a token that is no text."""
    draft, pending = tokenizers.draft, session.pending
    for leaf in tree.leaves():
        text, nodes, ends, is_end = b"", [], [], False
        previous = session.draft_tokens[-1]
        for node in tree.path(leaf):
            token = tree.tokens[node]
            is_end = token in tokenizers.draft_ends
            if is_end:
                nodes.append(node)
                ends.append(len(text))
                break
            if token in draft.special_ids and not tokenizers.target.has_piece_of(draft, token):
                break
            text += draft.bytes_after(previous, token)
            previous = token
            nodes.append(node)
            ends.append(len(text))
        whole = text.decode(errors="ignore").encode()
        if nodes and text.startswith(whole) and whole.startswith(pending):
            yield _Path(tuple(nodes), tuple(ends), whole, is_end)


class _TreeBuilder:
    """Joins paths of the target's tokens to one tree."""

    def __init__(self, drafted: Proposal, max_depth: int, known: NextTokens) -> None:
        """`drafted` is the draft model's tree; a path names its nodes. `known` is what the target's grammar says."""
        self._drafted = drafted
        self._max_depth, self._known = max_depth, known
        self._index: dict[tuple[int, int], int] = {}
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._sources: list[int] = []
        """The node of the draft model's tree that completes each token; of several, the most probable one."""

    def add(self, path: Sequence[tuple[int, int]]) -> None:
        """Add a path up to a token that the grammar excludes. The draft model's nodes complete its tokens."""
        parent = ROOT
        for depth, (token, source) in enumerate(path[: self._max_depth]):
            if not self._known.permits(depth, token):
                return
            node = self._index.get((parent, token))
            if node is None:
                node = self._index[parent, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(parent)
                self._sources.append(source)
            elif self._probability(source) > self._probability(self._sources[node]):
                self._sources[node] = source
            parent = node

    def build(self, row: DraftRow) -> Proposal:
        """The proposal with the most probable nodes that the row's budget allows."""
        drafted = self._drafted
        order = sorted(range(len(self._tokens)), key=lambda node: (-self._probability(self._sources[node]), node))
        chosen = sorted(order[: row.budget.max_nodes])
        sources, origins = [self._sources[node] for node in chosen], drafted.node_origins
        return Proposal(
            row.sequence_id,
            row.base_len,
            TokenTree(tuple(self._tokens), tuple(self._parents)).subset(chosen),
            probabilities=tuple(map(self._probability, sources)) if drafted.probabilities else (),
            ready=len(chosen) * drafted.ready // max(1, len(drafted.tree)),
            origins=tuple(origins[source] for source in sources),
        )

    def _probability(self, source: int) -> float:
        return self._drafted.probabilities[source] if self._drafted.probabilities else 1.0
