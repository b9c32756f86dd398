"""A draft model with another tokenizer: its text becomes tokens that follow the committed ones of the target."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from cluster.core.draft_origin import DraftOrigin
from cluster.core.drafting import DraftBudget, DraftRow, Proposal, RowFault
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from tests.support.models import tiny_tokenizer
from workers.draft.common.sessions import Session, Sessions
from workers.draft.model.text_drafter import TextDrafter, TextSession, Tokenizers
from workers.model.text_tokenizer import TextTokenizer

BUDGET = DraftBudget(48, 48)
_LONGEST = 16
"""Bytes at the end of a draft in which a word or a special token may be cut."""
TEXTS = (
    "hello the world, the fish swims. hello hello worlds\n\n  the end\t",
    "Grüße aus Köln 🐟🐠 — 世界 hello 👩‍👩‍👧‍👦! naïve café e\u0301",
    "<|im_start|>user\nhello the 🐟<|im_end|>\n<|im_start|>assistant\nthe world is wet<|im_end|>\n",
    "def f(x):\n    return x ** 2  # 12345 67\n\n\nprint(f(3))\n",
    "     leading spaces,  double  spaces   ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 3,
    "hello the world " * 30,
)
WORDS = " ".join(TEXTS[:5]).replace("<|im_end|>", " ").replace("<|im_start|>", " ")


def _trained(directory: Path, words: str = WORDS, normalizer: normalizers.Normalizer | None = None) -> Path:
    """A byte-level tokenizer with a beginning of texts, which learned longer tokens."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [("<bos>", 0)])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _composing(directory: Path) -> Path:
    """A tokenizer that composes characters, so that its tokens do not spell every text."""
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer.byte_level(directory) / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


KINDS: dict[str, Callable[[Path], Path]] = {
    "bytes": tiny_tokenizer.byte_level,
    "pieces": tiny_tokenizer.sentencepiece,
    "trained": _trained,
    "composing": _composing,
}
PAIRS = [(one, other) for one in KINDS for other in KINDS if one != other]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: TextTokenizer.load(make(root / name)) for name, make in KINDS.items()}


Draft = Callable[[DraftRow, Sequence[int]], Proposal]
"""What a draft model proposes for a row and the tokens of its sequence; the names of the row are put in."""


class DraftModel:
    """A draft model with any drafts, which refuses the rows that a real one refuses."""

    def __init__(self, draft: Draft, vocabulary_size: int | None = None) -> None:
        self._draft = draft
        self.sessions = Sessions(Session, vocabulary_size=vocabulary_size)

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        return tuple(map(self._propose, rows))

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        self.sessions.release(sequence_ids)

    def _propose(self, row: DraftRow) -> Proposal:
        session = self.sessions.apply(row)
        if isinstance(session, RowFault):
            return Proposal(row.sequence_id, row.base_len, fault=session)
        return replace(self._draft(row, session.tokens), sequence_id=row.sequence_id, base_len=row.base_len)


def drafted(tree: TokenTree) -> Proposal:
    return Proposal(SequenceId(""), 0, tree)


def oracle(tokenizers: Tokenizers, text: str) -> Draft:
    """The draft of a model that knows how the text goes on."""
    draft, whole = tokenizers.draft, text.encode()

    def after(rest: str) -> list[int]:
        """Tokens that spell the text, without a space before it: no token joins it with the character before."""
        (tokens,) = draft.encode(["\0" + rest])
        at = [draft.bytes_of(token) for token in tokens].index(b"\0")
        return list(tokens[at + 1 :])

    def propose(row: DraftRow, tokens: Sequence[int]) -> Proposal:
        pairs = [*zip([None, *tokens], tokens, strict=False)][len(draft.opening) :]
        spelled = b"".join(draft.bytes_after(one, other) for one, other in pairs)
        rest = whole[len(spelled) :] if whole.startswith(spelled) else b""
        most = min(row.budget.max_nodes, row.budget.max_depth)
        return drafted(TokenTree.chain(after(rest.decode(errors="ignore"))[:most]))

    return propose


def repeating(row: DraftRow, tokens: Sequence[int]) -> Proposal:
    """The draft of a model that repeats the last tokens, as a tree."""
    last = list(tokens[-6:])
    return drafted(TokenTree.from_candidates([last[:3], last[2:], last[1:]], row.budget.max_nodes))


class Forgetful(DraftModel):
    """A draft model that forgets its sequences now and then."""

    calls = 0

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        self.calls += 1
        if self.calls % 7 == 0:
            self.release([row.sequence_id for row in rows])
        return super().propose(rows)


def _rows(tokens: Sequence[int], draw: random.Random, sampling: SamplingParameters) -> Iterator[DraftRow]:
    """Rows that commit the tokens a few at a time."""
    start = SequenceStart(1, sampling)
    known = 0
    while known < len(tokens):
        length = min(len(tokens), known + draw.randrange(1, 5))
        yield DraftRow(SequenceId("a"), length, tuple(tokens[known:length]), BUDGET, None if known else start)
        known = length


def _bytes(tokenizer: TextTokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(map(tokenizer.bytes_of, tokens))


def _pair(kinds: dict[str, TextTokenizer], target: str, draft: str) -> Tokenizers:
    return Tokenizers(kinds[target], kinds[draft], 400, (1,))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_drafted_text_becomes_the_tokens_that_the_target_writes(
    target: str, draft: str, text: str, kinds: dict[str, TextTokenizer]
) -> None:
    """A draft model that knows the text is right, but for words that its draft cuts."""
    tokenizers = _pair(kinds, target, draft)
    (whole,) = tokenizers.target.encode([text])
    written = unicodedata.normalize("NFC", text) if target == "composing" else text
    drafter = TextDrafter(DraftModel(oracle(tokenizers, written)), tokenizers)
    compared = 0
    for row in _rows(whole, random.Random(1), SamplingParameters()):
        (proposal,) = drafter.propose([row])
        assert (proposal.base_len, proposal.fault) == (row.base_len, None)
        tree = proposal.tree
        assert tree.is_chain and len(tree) <= BUDGET.max_nodes
        left = len(_bytes(tokenizers.target, tree.tokens))
        for token, expected in zip(tree.tokens, whole[row.base_len :], strict=False):
            left -= len(tokenizers.target.bytes_of(token))
            if left < _LONGEST:
                break
            assert token == expected
            compared += 1
    assert compared > len(whole) // 8


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_the_draft_model_reads_the_text_as_its_tokenizer_encodes_it(
    target: str, draft: str, text: str, kinds: dict[str, TextTokenizer]
) -> None:
    """Token by token, and only the end is encoded again."""
    tokenizers = _pair(kinds, target, draft)
    (tokens,) = tokenizers.target.encode([text])
    session = TextSession(SequenceStart(1, SamplingParameters()), tokenizers)
    for length, token in enumerate(tokens):
        session.replace(length, [token])
        session.read()
        fresh = TextSession(session.start, tokenizers)
        fresh.replace(0, tokens[: length + 1])
        fresh.read()
        assert session.text == fresh.text
        assert session.draft_tokens == fresh.draft_tokens
    normal = session.text.decode()
    (encoded,) = tokenizers.draft.encode([normal])
    assert session.draft_tokens == [*tokenizers.draft.opening, *encoded]
    assert normal == text or target == "composing"


@pytest.mark.parametrize(("target", "draft"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
@pytest.mark.parametrize("seed", range(4))
def test_any_tokens_in_any_order_give_proposals_that_fit(
    target: str, draft: str, seed: int, kinds: dict[str, TextTokenizer]
) -> None:
    """Random tokens have invalid bytes, cut characters and special tokens anywhere, and their ends are replaced."""
    draw = random.Random(seed)
    tokenizers = _pair(kinds, target, draft)
    drafter = TextDrafter(Forgetful(repeating), tokenizers)
    tokens = [draw.randrange(300) for _ in range(20)]
    known = 0
    for _ in range(30):
        row = DraftRow(
            SequenceId("a"),
            len(tokens),
            tuple(tokens[known:]),
            BUDGET,
            SequenceStart(1, SamplingParameters(end_token_ids=(2,))) if known == 0 else None,
        )
        (proposal,) = drafter.propose([row])
        assert proposal.fault is None and len(proposal.tree) <= BUDGET.max_nodes
        assert all(0 <= token < tokenizers.target_size for token in proposal.tree.tokens)
        assert proposal.tree.depth() <= BUDGET.max_depth
        (session,) = drafter._sessions.least_recent()
        fresh = TextSession(session.start, tokenizers)
        fresh.replace(0, tokens)
        fresh.read()
        assert session.text == fresh.text and session.pending == fresh.pending
        spelled = [_bytes(tokenizers.draft, one.draft_tokens) for one in (session, fresh)]
        assert spelled[0] == spelled[1]
        known = len(tokens) - draw.randrange(4)
        tokens = [*tokens[:known], *(draw.randrange(300) for _ in range(draw.randrange(1, 6)))]
        assert known > 0
    drafter.release([SequenceId("a")])
    assert len(drafter._sessions) == 0


def _proposed(
    tokenizers: Tokenizers,
    committed: Sequence[int],
    tree: TokenTree,
    sampling: SamplingParameters | None = None,
    budget: DraftBudget = BUDGET,
    probabilities: tuple[float, ...] = (),
    origins: tuple[DraftOrigin, ...] = (),
) -> Proposal:
    fixed = replace(drafted(tree), probabilities=probabilities, origins=origins, ready=len(tree))
    start = SequenceStart(1, sampling or SamplingParameters())
    row = DraftRow(SequenceId("a"), len(committed), tuple(committed), budget, start)
    return TextDrafter(DraftModel(lambda _, __: fixed), tokenizers).propose([row])[0]


def _token(tokenizer: TextTokenizer, piece: bytes) -> int:
    return next(token for token in range(400) if tokenizer.bytes_of(token) == piece)


def test_committed_tokens_stay_where_the_target_would_have_joined_them(kinds: dict[str, TextTokenizer]) -> None:
    """`he`, `ll` were committed, which the tokenizer writes as `hell`: what follows is spelled on its own."""
    tokenizers = _pair(kinds, "bytes", "pieces")
    target, draft = tokenizers.target, tokenizers.draft
    committed = [_token(target, b"he"), _token(target, b"l")]
    tree = TokenTree.chain([_token(draft, b"l"), _token(draft, b"o"), _token(draft, b" t"), _token(draft, b"he")])

    found = _proposed(tokenizers, committed, tree).tree

    assert found.is_chain and _bytes(target, found.tokens) == b"lo the"
    assert found.tokens[-1] != target.encode(["e"])[0][0]


def test_a_cut_character_waits_and_the_draft_completes_it(kinds: dict[str, TextTokenizer]) -> None:
    tokenizers = _pair(kinds, "bytes", "pieces")
    target = tokenizers.target
    (fish,) = target.encode(["🐟"])
    (drafted,) = tokenizers.draft.encode(["🐟🐟"])
    tree = TokenTree.chain(drafted[-8:])
    session = TextSession(SequenceStart(1, SamplingParameters()), tokenizers)
    committed = [*target.encode(["the"])[0], *fish[:3]]
    session.replace(0, committed)
    assert (bytes(session.text), session.pending) == (b"the", "🐟".encode()[:3])

    found = _proposed(tokenizers, committed, tree).tree

    assert found.tokens == (*fish[3:], *fish)
    other = TokenTree.chain(tokenizers.draft.encode(["世"])[0][-3:])
    assert not _proposed(tokenizers, committed, other).tree  # it does not complete the character
    half = TokenTree.chain(drafted[-8:-2])
    assert _proposed(tokenizers, committed, half).tree.tokens == (fish[3],)


def test_siblings_with_one_beginning_share_its_tokens_and_the_most_probable_nodes_stay(
    kinds: dict[str, TextTokenizer],
) -> None:
    tokenizers = _pair(kinds, "bytes", "pieces")
    target, draft = tokenizers.target, tokenizers.draft
    (committed,) = target.encode(["the"])
    first, second, other = (_token(draft, piece) for piece in (b"r", b"e", b"s"))
    tree = TokenTree((first, second, other), (-1, 0, -1))
    kinds_of = (DraftOrigin.TRAINED, DraftOrigin.REQUEST, DraftOrigin.TRAINED)

    found = _proposed(tokenizers, committed, tree, None, BUDGET, (0.6, 0.5, 0.2), kinds_of)

    assert [_bytes(target, path) for path in found.tree.candidates()] == [b"re", b"s"]
    assert found.probabilities == (0.6, 0.5, 0.2) and found.origins == kinds_of and found.ready == 3
    few = _proposed(tokenizers, committed, tree, None, DraftBudget(2, 8), (0.6, 0.5, 0.2), kinds_of)
    assert _bytes(target, few.tree.tokens) == b"re" and few.tree.is_chain
    flat = _proposed(tokenizers, committed, tree, None, DraftBudget(8, 1), (0.6, 0.5, 0.2), kinds_of)
    assert flat.tree.parents == (-1, -1)


def test_the_end_of_the_draft_is_the_end_of_the_answer(kinds: dict[str, TextTokenizer]) -> None:
    tokenizers = replace(_pair(kinds, "bytes", "trained"), draft_ends=(1,))
    target, draft = tokenizers.target, tokenizers.draft
    (committed,) = target.encode(["<|im_start|>the<|im_end|>"])
    (word,) = draft.encode([" the"])
    tree = TokenTree.chain([*word, 1, *word])
    ends = SamplingParameters(end_token_ids=(0, 2))

    assert _proposed(tokenizers, committed, tree, ends).tree.tokens == (*target.encode([" the"])[0], 2)
    assert _proposed(tokenizers, committed[:2], tree, ends).tree.tokens[-1] == 0
    assert _proposed(tokenizers, committed, tree).tree.tokens == target.encode([" the"])[0]
    beginning = TokenTree.chain([*word, 0, *word])  # a special token that the target has not
    assert _proposed(tokenizers, committed, beginning, ends).tree.tokens == target.encode([" the"])[0]


def test_special_tokens_of_both_are_drafted_and_those_before_every_text_are_not_read_as_text(
    tmp_path: Path, kinds: dict[str, TextTokenizer]
) -> None:
    opened = TextTokenizer.load(tiny_tokenizer.byte_level(tmp_path / "opened", opens_texts=True))
    tokenizers = Tokenizers(opened, kinds["trained"], 400, (1,))
    session = TextSession(SequenceStart(1, SamplingParameters()), tokenizers)
    session.replace(0, [1, *opened.encode(["the<|im_start|>"])[0]])
    session.read()
    assert session.text == b"the<|im_start|>"
    assert session.draft_tokens == [0, *kinds["trained"].encode(["the<|im_start|>"])[0]]
    close = TokenTree.chain(kinds["pieces"].encode(["the<|im_end|>\n"])[0][1:])
    (committed,) = kinds["bytes"].encode(["the fish:"])
    found = _proposed(_pair(kinds, "bytes", "pieces"), committed, close).tree
    assert 2 in found.tokens


@pytest.mark.parametrize("draft", ["trained", "composing"])
def test_a_long_text_is_not_encoded_again(
    draft: str, kinds: dict[str, TextTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the draft model's tokenizer composes characters of it, so that its tokens spell another text."""
    tokenizers = _pair(kinds, "bytes", draft)
    assert "e\u0301" in WORDS
    (tokens,) = tokenizers.target.encode([WORDS * 5])
    session = TextSession(SequenceStart(1, SamplingParameters()), tokenizers)
    session.replace(0, tokens[:-40])
    session.read()
    lengths: list[int] = []
    encode = tokenizers.draft.encode

    def recorded(texts: Sequence[str]) -> list[tuple[int, ...]]:
        lengths.extend(map(len, texts))
        return encode(texts)

    monkeypatch.setattr(tokenizers.draft, "encode", recorded)
    for length in range(len(tokens) - 40, len(tokens)):
        session.replace(length, tokens[length : length + 1])
        session.read()
    assert lengths and max(lengths) < 400
    whole = encode([bytes(session.text).decode()])[0]
    assert session.draft_tokens == [*tokenizers.draft.opening, *whole]


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFD()], ids=["NFC", "NFD"])
@pytest.mark.parametrize("step", [1, 3])
def test_marks_that_are_put_before_others_are_read_in_their_order(
    normalizer: normalizers.Normalizer, step: int, tmp_path: Path, kinds: dict[str, TextTokenizer]
) -> None:
    """A dot below comes before the accents that stand above, however many the draft model has read."""
    accent, below, hook = "\u0301", "\u0323", "\u0327"
    draft = TextTokenizer.load(_trained(tmp_path / "marks", f"q{accent} q{below} q{hook} q{accent}" * 4, normalizer))
    assert {accent.encode(), below.encode()} <= {draft.bytes_of(token) for token in range(400)}
    text = (
        f"the q{accent * 9}{below}{accent} q{accent}{accent}{below}{hook} e{accent}{below} " + f"q{accent * 24}{below}"
    )
    tokenizers = Tokenizers(kinds["bytes"], draft, 400)
    (tokens,) = tokenizers.target.encode([text])
    session = TextSession(SequenceStart(1, SamplingParameters()), tokenizers)
    for length in range(0, len(tokens), step):
        session.replace(length, tokens[length : length + step])
        session.read()
        assert session.draft_tokens == [*draft.opening, *draft.encode([session.text.decode()])[0]]
    assert session.text.decode() == text


def test_the_draft_model_is_not_shown_tokens_beyond_its_vocabulary(kinds: dict[str, TextTokenizer]) -> None:
    """A draft model's tokenizer may have more tokens than its embedding. Drafting goes on behind them."""
    size = 300
    tokenizers = replace(_pair(kinds, "bytes", "trained"), draft_size=size)
    whole = tokenizers.draft.encode([WORDS])[0]
    assert max(whole) >= size
    shown: list[list[int]] = []

    def draft(row: DraftRow, tokens: Sequence[int]) -> Proposal:
        shown.append(list(tokens))
        return repeating(row, tokens)

    (tokens,) = tokenizers.target.encode([WORDS])
    drafter = TextDrafter(DraftModel(draft, vocabulary_size=size), tokenizers)
    rows = list(_rows(tokens, random.Random(2), SamplingParameters()))
    found = [drafter.propose([row])[0] for row in rows]
    assert all(one.fault is None for one in found) and sum(bool(one.tree) for one in found) > len(rows) // 2
    assert len(shown) == len(rows)
    assert shown[-1] == [*tokenizers.draft.opening, *(token for token in whole if token < size)]


def test_a_target_may_write_tokens_that_its_tokenizer_has_not(kinds: dict[str, TextTokenizer]) -> None:
    """Embeddings are padded. Such a token adds no text, and what the draft model knows of the text stays right."""
    tokenizers = _pair(kinds, "bytes", "trained")
    text, padding = TEXTS[0], 399
    assert tokenizers.target.bytes_of(padding) == b""
    (whole,) = tokenizers.target.encode([text])
    drafter = TextDrafter(DraftModel(oracle(tokenizers, text)), tokenizers)
    right = 0
    for row in _rows([token for one in whole for token in (one, padding)], random.Random(1), SamplingParameters()):
        (proposal,) = drafter.propose([row])
        assert proposal.fault is None and padding not in proposal.tree.tokens
        right += proposal.tree.tokens[:1] == whole[(row.base_len + 1) // 2 :][:1]
    assert right > len(whole) // 4


def test_a_tokenizer_says_where_its_tokens_end(tmp_path: Path) -> None:
    added = TextTokenizer.load(tiny_tokenizer.sentencepiece(tmp_path))
    (tokens,) = added.encode(["hello é"])
    assert added.strips_first_space
    assert [added.bytes_of(token) for token in tokens] == [b" ", b"he", b"ll", b"o", b" ", b"\xc3", b"\xa9"]
    assert added.ends(tokens, "hello é".encode()) == [0, 2, 4, 5, 6, 7, 8]
    assert added.ends(tokens, b"other") is None
    text = b"the<|im_end|>  he<|im_start|>he"
    (tokens,) = added.encode([text.decode()])
    ends = added.ends(tokens, text)
    assert ends is not None
    spelled = [text[begin:end] for begin, end in pairwise([0, *ends])]
    assert spelled == [b"t", b"he", b"<|im_end|>", b"", b" ", b" ", b"he", b"<|im_start|>", b"", b"he"]
    assert added.bytes_of(9999) == b""
    assert AddedToken("<|im_end|>").content.encode() == added.bytes_of(2)
