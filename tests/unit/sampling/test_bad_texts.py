"""Texts that no word of an answer begins with, whatever the tokens that spell them."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.models import tiny_tokenizer
from workers.sampling.bad_texts import BadTexts, TokenTexts

PIECES = [
    "",
    "c",
    "cl",
    "imb",
    "climb",
    "ed",
    "edge",
    " ",
    " climbed",
    " cl",
    "re",
    "climbed",
    "(climbed)",
    "e",
    "d",
    "!",
]
PIECES += ["中", "国", "人", "$", "5", "$5", "\n", "bed"]
TEXTS = [piece.encode() for piece in PIECES] + [bytes([byte]) for byte in "中é".encode()]
WORDS = ["climbed", "中国", "$5", "é"]


def joins(character: str) -> bool:
    return character.isalnum() and unicodedata.category(character) != "Lo"


def contains(text: str, words: list[str]) -> bool:
    """Whether a word of the text begins with one of the words."""
    for word in words:
        at = text.find(word)
        while at >= 0:
            if at == 0 or not (joins(word[0]) and joins(text[at - 1])):
                return True
            at = text.find(word, at + 1)
    return False


def text_of(tokens: list[int]) -> str:
    return b"".join(TEXTS[token] for token in tokens).decode("utf-8", "replace")


@pytest.mark.parametrize("seed", range(60))
def test_a_token_is_excluded_exactly_where_it_completes_a_text(seed: int) -> None:
    """Random answers over pieces that overlap the texts in many ways, against a search in the whole text."""
    draw, texts = random.Random(seed), BadTexts(TokenTexts(TEXTS), WORDS)
    prompt = [draw.randrange(len(TEXTS)) for _ in range(3)]
    answer: list[int] = []
    for _ in range(60):
        allowed = texts.allowed([*prompt, *answer], len(prompt))
        for token, is_allowed in enumerate(allowed.tolist()):
            text = text_of([*answer, token])
            assert is_allowed == (not contains(text, WORDS)), (text_of(answer), TEXTS[token])
        choices = [token for token, is_allowed in enumerate(allowed.tolist()) if is_allowed]
        answer.append(draw.choice(choices))
    assert not contains(text_of(answer), WORDS)


@pytest.mark.parametrize(
    ("before", "token", "is_allowed"),
    [
        ("", "climbed", False),
        (" ", "climbed", False),
        ("re", "climbed", True),  # inside of a word
        ("cl|imb", "ed", False),
        ("re|cl|imb", "ed", True),
        (" cl|imb", "edge", False),  # a longer word that begins with it
        ("", " climbed", False),
        ("re", "(climbed)", False),
        ("cl|imb", "e", True),
        ("cl|imb|e", "d", False),
        ("中", "国", False),
        ("人|中", "国", False),  # scripts without spaces have no inside
        ("5", "$5", False),
    ],
)
def test_a_text_is_found_in_every_tokenization(before: str, token: str, is_allowed: bool) -> None:
    tokens = [PIECES.index(piece) for piece in before.split("|")]
    allowed = BadTexts(TokenTexts(TEXTS), WORDS).allowed(tokens, 0)
    assert allowed[PIECES.index(token)].item() is is_allowed


def test_the_prompt_is_no_part_of_the_answer() -> None:
    tokens = [PIECES.index("cl"), PIECES.index("imb")]
    texts = BadTexts(TokenTexts(TEXTS), WORDS)
    assert texts.allowed(tokens, 2)[PIECES.index("ed")]
    assert not texts.allowed(tokens, 0)[PIECES.index("ed")]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_the_texts_of_a_vocabulary_are_those_of_the_service(tmp_path: Path, kind: str) -> None:
    directory: Path = getattr(tiny_tokenizer, kind)(tmp_path)
    tokenizer, texts = Tokenizer.load(directory), TokenTexts.load(directory, 400).texts
    for token in range(400):
        expected = b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token)
        assert texts[token] == expected


def test_unigram_vocabularies_and_added_tokens_are_read(tmp_path: Path) -> None:
    content = {
        "decoder": {"type": "Metaspace", "replacement": "▁"},
        "model": {"vocab": [["<unk>", 0.0], ["▁a", -1.0]]},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}, {"id": 2, "content": "<x>", "special": False}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert TokenTexts.load(tmp_path, 4).texts == [b"", b" a", b"<x>", b""]


def test_a_model_without_such_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        TokenTexts.load(tmp_path, 4)
