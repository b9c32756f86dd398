"""Tokenization and detokenization."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from tests.support.models.tiny_tokenizer import byte_level, sentencepiece

texts = st.text(max_size=20) | st.sampled_from(
    ["👩‍👩‍👧 family", "世界 hello", "  two spaces", "\n\ttabs", "naïve café", "🐟"]
)


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def library(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=texts)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=texts)
def test_tokens_are_decoded_as_the_library_does(tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == library.decode(tokens)


@given(tokens=st.lists(st.integers(0, 300), max_size=12))
def test_the_parts_of_a_text_equal_the_whole(tokenizer: Tokenizer, tokens: list[int]) -> None:
    stream = tokenizer.detokenizer(starts_text=True)
    pieces = [stream.push(token) for token in tokens]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(tokens)


def test_an_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    fish = [token for token in tokenizer.encode("🐟") if tokenizer.token_bytes(token) != b" "]
    assert len(fish) == 4
    assert [stream.push(token) for token in fish] == ["", "", "", "🐟"]


def test_a_character_that_stays_incomplete_becomes_one_replacement_character(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert stream.push(tokenizer.encode("🐟")[-4]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"


def test_a_continuation_keeps_its_first_space(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("a world")[len(tokenizer.encode("a")) :]
    stream = tokenizer.detokenizer()
    assert "".join(stream.push(token) for token in continuation) == " world"


_LEGACY = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}


@pytest.mark.parametrize(
    ("settings", "legacy"),
    [
        ({"eos_token": "<|endoftext|>"}, _LEGACY),
        ({"bos_token": "<|endoftext|>", "added_tokens_decoder": {}}, _LEGACY),
        ({"image_token": "<|endoftext|>"}, {}),
        ({"extra_special_tokens": {"image_token": "<|endoftext|>"}, "bos_token": None}, {}),
    ],
)
def test_templates_get_the_special_tokens_that_the_library_gives_them(
    settings: dict[str, object], legacy: dict[str, object], tmp_path: Path
) -> None:
    path = byte_level(tmp_path)
    template = "{{ bos_token }}|{{ image_token }}|{{ messages[0].content }}{{ eos_token }}"
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (path / "special_tokens_map.json").write_text(json.dumps(legacy))
    turns = [{"role": "user", "content": "fish"}]
    expected = PreTrainedTokenizerFast.from_pretrained(path).apply_chat_template(turns, tokenize=False)
    assert Tokenizer.load(path).render_chat([Message("user", "fish")]) == expected
    assert "<|" in expected


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("hello<|im_end|>")
    assert tokenizer.decode(tokens) == "hello"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "hello<|im_end|>"


def test_an_unused_id_adds_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([9999]) == ""


def test_a_rendered_conversation_ends_where_the_assistant_begins(tokenizer: Tokenizer) -> None:
    messages = [Message("user", "hello")]
    assert tokenizer.render_chat(messages) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode_chat(messages)
    assert tokens[0] == 1
    assert (tokens.count(1), tokens.count(2)) == (2, 1)


def test_the_error_of_a_template_is_reported(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no villains") as caught:
        tokenizer.encode_chat([Message("villain", "ha")])
    assert caught.value.field == "messages"


def test_end_of_sequence_comes_from_the_generation_settings_then_the_model_then_the_tokenizer(tmp_path: Path) -> None:
    byte_level(tmp_path)
    assert Tokenizer.load(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert Tokenizer.load(tmp_path).eos_token_ids == (0,)
    (tmp_path / "config.json").unlink()
    assert Tokenizer.load(tmp_path).eos_token_ids == (2,)


def test_a_template_file_comes_before_the_settings(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    assert Tokenizer.load(tmp_path).render_chat([Message("user", "hi")]) == "hi"


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        Tokenizer.load(tmp_path).render_chat([Message("user", "hi")])


def test_chats_are_refused_without_a_template(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.load(tmp_path).encode_chat([Message("user", "hi")])


def test_a_missing_or_unknown_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needed a tokenizer"):
        Tokenizer.load(tmp_path)
    byte_level(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="CTC"):
        Tokenizer.load(tmp_path)
