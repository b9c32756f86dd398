"""MarianMT's tokenizer, compared with that of `transformers`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import MarianTokenizer

from cluster.core.errors import ConfigurationError
from cluster.generation.text.bad_words import encode_bad_words
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.translation.tiny_marian import ENGLISH, FRENCH, marian_tokenizer

texts = st.text(max_size=16) | st.sampled_from(
    [
        *FRENCH,
        *ENGLISH,
        "",
        "  two  spaces ",
        "☃☃ un chien",
        "un</s> homme",
        "<unk>e",
        "</s>>>fra<< une",
        ">>fra<< la rue",
    ]
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return marian_tokenizer(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def library(directory: Path) -> Any:
    with warnings.catch_warnings(action="ignore"):  # it recommends another package
        return MarianTokenizer.from_pretrained(directory)


@given(text=texts)
def test_sources_become_the_tokens_of_transformers(tokenizer: Tokenizer, library: Any, text: str) -> None:
    assert list(tokenizer.encode(text)) == library(text)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(text)[:-1]


@given(text=texts)
def test_answers_become_the_tokens_of_transformers(tokenizer: Tokenizer, library: Any, text: str) -> None:
    assert list(tokenizer.encode_answer(text)) == library(text_target=text)["input_ids"][:-1]


def test_the_two_languages_have_different_pieces(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_answer(ENGLISH[0]) != tokenizer.encode(ENGLISH[0], add_special_tokens=False)


@given(tokens=st.lists(st.integers(0, 99), max_size=12), skip=st.booleans())
def test_parts_of_an_answer_are_the_whole_without_its_first_space(
    tokenizer: Tokenizer, tokens: list[int], skip: bool
) -> None:
    stream = tokenizer.detokenizer(skip_special_tokens=skip, starts_text=True)
    parts = "".join(stream.push(token) for token in tokens) + stream.flush()
    assert parts == tokenizer.decode(tokens, skip_special_tokens=skip)
    pieces = b"".join(tokenizer.token_bytes(token) for token in tokens if not (skip and tokenizer.is_special(token)))
    assert parts == pieces.decode().removeprefix(" ")


@pytest.mark.parametrize("text", ENGLISH)
def test_answers_are_decoded_as_transformers_does(tokenizer: Tokenizer, library: Any, text: str) -> None:
    tokens = [*tokenizer.encode_answer(text), *tokenizer.eos_token_ids]
    assert tokenizer.eos_token_ids == ()  # the table of ids does not say which token ends an answer
    assert tokenizer.decode([*tokens, 0]) == library.decode([*tokens, 0], skip_special_tokens=True) == text


def test_words_that_an_answer_must_not_contain_are_of_its_language(tokenizer: Tokenizer) -> None:
    assert not tokenizer.has_json_vocabulary
    assert encode_bad_words(tokenizer, ["street"]) == (tokenizer.encode_answer("street"),)


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    assert [token for token in range(96) if tokenizer.is_special(token)] == [0, 1, 95]
    assert tokenizer.token_bytes(0) == b"</s>"
    assert tokenizer.token_bytes(96) == b""
    assert not tokenizer.has_template


class TestBrokenFiles:
    """Every error names the file."""

    @pytest.fixture
    def broken(self, tmp_path: Path) -> Path:
        return marian_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("source.spm", "no model", r"source\.spm: needed a SentencePiece model"),
            ("vocab.json", "{", r"vocab\.json: needed JSON"),
            ("vocab.json", "[]", r"vocab\.json: needed an object"),
            ("vocab.json", json.dumps({"</s>": 0}), r"vocab\.json: needed the piece <unk>"),
            ("target_vocab.json", "{}", "needed one vocabulary for both languages"),
        ],
    )
    def test_is_refused(self, broken: Path, name: str, content: str, message: str) -> None:
        (broken / name).write_text(content)
        with pytest.raises(ConfigurationError, match=message):
            Tokenizer.load(broken)

    def test_a_missing_file_is_named(self, broken: Path) -> None:
        (broken / "target.spm").unlink()
        with pytest.raises(ConfigurationError, match=r"target\.spm: needed a SentencePiece model"):
            Tokenizer.load(broken)


SENTENCES = (
    "Une femme joue de la guitare.",
    "Deux jeunes hommes blancs sont dehors près de buissons ; l’un d’eux rit ½ € ☃.",
    "Two young, White males are outside near many bushes — “really”?",
    "A man's 2,000-year-old hat | costs 3.50 €.",
)


@pytest.mark.weights
@pytest.mark.parametrize("text", SENTENCES)
def test_a_real_model_has_the_tokens_of_transformers(translator_directory: Path, text: str) -> None:
    tokenizer = Tokenizer.load(translator_directory)
    with warnings.catch_warnings(action="ignore"):
        library = MarianTokenizer.from_pretrained(translator_directory)
    source, answer = tokenizer.encode(text), tokenizer.encode_answer(text)
    assert list(source) == library(text)["input_ids"]
    assert list(answer) == library(text_target=text)["input_ids"][:-1]
    assert tokenizer.decode(answer) == library.decode(answer, skip_special_tokens=True)
    assert tokenizer.eos_token_ids == (0,)
