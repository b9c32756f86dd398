"""The tokenizer of a GGUF file divides texts as the original one does, whatever `transformers` makes of the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, Phi3Config, PreTrainedConfig

from cluster.core.errors import ModelLoadError
from tests.support.models import stored_gguf, tiny
from workers.model.model_files import end_of_sequence_ids, resolve_model_directory

NORMAL, CONTROL = 1, 3
ENDS = ["<|endoftext|>", "<|begin|>"]
MERGES = ["3 3", "33 3", "\u0120 \u00c2", "\u0120 4", "' '"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORD = "zebra"
"""A word of the vocabulary that no merges lead to."""
PIECES = [*ENDS, *BYTES, *(merge.replace(" ", "") for merge in MERGES), WORD]
SPACE = "\u2581"
SENTENCE_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", f"{SPACE}a"]


def converted(directory: Path, keys: dict[str, Any], architecture: str = "llama") -> Path:
    """The directory of a model whose GGUF file has these keys of a tokenizer."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    vocabulary = len(keys["tokenizer.ggml.tokens"])
    config = FAMILIES[architecture](vocab_size=vocabulary, pad_token_id=0, eos_token_id=0)
    source = tiny.save(directory / "source", config)
    sizes = {
        "vocab_size": vocabulary,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    file = directory / "model.gguf"
    model = AutoModelForCausalLM.from_pretrained(source)
    stored_gguf.write(model, file, architecture, {}, "F32", keys=sizes | keys)
    return resolve_model_directory(str(file), directory / "cache")


def phi3(**changes: Any) -> PreTrainedConfig:
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    return Phi3Config(**shape, num_key_value_heads=3, max_position_embeddings=256, **changes)


FAMILIES: dict[str, Callable[..., PreTrainedConfig]] = {"llama": tiny.llama, "phi3": phi3}


def byte_level(pre: str | None, pieces: list[str] = PIECES, **more: Any) -> dict[str, Any]:
    kinds = [CONTROL if piece.startswith("<|") else NORMAL for piece in pieces]
    own = {"model": "gpt2", "tokens": pieces, "token_type": kinds, "merges": MERGES}
    return own | {"eos_token_id": 0, "bos_token_id": 1} | ({} if pre is None else {"pre": pre}) | more


def sentencepiece(**more: Any) -> dict[str, Any]:
    scores = [0.0] * (len(SENTENCE_PIECES) - 1) + [-1.0]
    kinds = [NORMAL] * len(SENTENCE_PIECES)
    own = {"model": "llama", "tokens": SENTENCE_PIECES, "scores": scores, "token_type": kinds}
    return own | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "padding_token_id": 0} | more


def pieces_of(directory: Path, text: str, *, add_special_tokens: bool = False) -> list[str]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    found: list[str] = tokenizer.encode(text, add_special_tokens=add_special_tokens).tokens
    return found


DIVIDED: dict[str, tuple[str | None, str, list[str]]] = {
    "GPT-2 joins numbers": ("gpt-2", "3333", ["33", "33"]),
    "a space before a number is no part of it": ("smollm", " \u00bd", ["\u0120", "\u00c2", "\u00bd"]),
    "DeepSeek's first vocabulary has single digits": ("deepseek-llm", "3333", ["3", "3", "3", "3"]),
    "DeepSeek's coder, too": ("deepseek-coder", "3333", ["3", "3", "3", "3"]),
    "DeepSeek-V3 has groups of three digits": ("deepseek-v3", "3333", ["333", "3"]),
    "Falcon, too": ("falcon", "3333", ["333", "3"]),
    "Llama 3, too": ("llama-bpe", "3333", ["333", "3"]),
    "files without the key, too": (None, "3333", ["333", "3"]),
    "Llama 3 looks words up": ("llama-bpe", WORD, [WORD]),
    "GLM-4 does, too, unlike in llama.cpp": ("glm4", WORD, [WORD]),
    "GLM-4 as tiktoken has it, too": ("chatglm-bpe", WORD, [WORD]),
    "GPT-2 reaches words by merges alone": ("gpt-2", WORD, [*WORD]),
}


@pytest.mark.parametrize("what", DIVIDED)
def test_texts_are_divided_as_the_vocabulary_was_made(what: str, tmp_path: Path) -> None:
    pre, text, pieces = DIVIDED[what]
    assert pieces_of(converted(tmp_path, byte_level(pre)), text) == pieces


def test_a_way_to_divide_texts_that_is_not_known_is_refused_by_its_name(tmp_path: Path) -> None:
    wanted = re.escape("tokenizer.ggml.pre is 'of-tomorrow'; it must be one of a.x-4.0, bloom,")
    with pytest.raises(ModelLoadError, match=wanted):
        converted(tmp_path, byte_level("of-tomorrow"))


@pytest.mark.parametrize(("more", "begins"), [({}, True), ({"add_bos_token": False}, False)])
def test_texts_of_llama_3_begin_with_a_token_unless_the_file_says_otherwise(
    more: dict[str, Any], begins: bool, tmp_path: Path
) -> None:
    directory = converted(tmp_path, byte_level("llama-bpe", **more))
    found = pieces_of(directory, "3", add_special_tokens=True)
    assert found == ([ENDS[1], "3"] if begins else ["3"])


@pytest.mark.parametrize(
    ("more", "text", "pieces"),
    [
        ({}, "a", [f"{SPACE}a"]),
        ({}, " a", [SPACE, f"{SPACE}a"]),
        ({}, "</s>a", ["</s>", f"{SPACE}a"]),
        ({"add_space_prefix": False}, "a", ["a"]),
        ({"add_space_prefix": False}, " a", [f"{SPACE}a"]),
    ],
)
def test_sentencepiece_puts_a_space_before_each_text_unless_the_file_says_otherwise(
    more: dict[str, Any], text: str, pieces: list[str], tmp_path: Path
) -> None:
    directory = converted(tmp_path, sentencepiece(**more))
    assert pieces_of(directory, text) == pieces
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text.removeprefix("</s>")


@pytest.mark.parametrize(
    ("architecture", "pieces"),
    [
        ("phi3", ["<|user|>\n", f"{SPACE}a", "<|end|>\n"]),
        ("llama", ["<|user|>", SPACE, "<0x0A>", "a", "<|end|>", SPACE, "<0x0A>"]),
    ],
)
def test_tokens_of_phi_3_take_the_white_space_after_them(architecture: str, pieces: list[str], tmp_path: Path) -> None:
    own = sentencepiece()
    more = {
        "tokens": [*own["tokens"], "<|user|>", "<|end|>"],
        "scores": [*own["scores"], 0.0, 0.0],
        "token_type": [*own["token_type"], CONTROL, CONTROL],
    }
    directory = converted(tmp_path, own | more, architecture)
    assert pieces_of(directory, "<|user|>\na<|end|>\n") == pieces


def test_tokens_that_end_a_turn_by_their_texts_end_generation(tmp_path: Path) -> None:
    """Files of Phi-3 name the end of a text alone."""
    pieces = [*PIECES, "<|end|>", "<|user|>"]
    directory = converted(tmp_path, byte_level("gpt-2", pieces))
    assert end_of_sequence_ids(directory) == (0, len(PIECES))


def test_a_part_of_a_turn_does_not_end_generation(tmp_path: Path) -> None:
    """gpt-oss ends each channel with the token that ends a turn elsewhere."""
    pieces = [*PIECES, "<|end|>", "<|return|>", "<|call|>"]
    directory = converted(tmp_path, byte_level("gpt-4o", pieces))
    assert end_of_sequence_ids(directory) == (0, len(PIECES) + 1, len(PIECES) + 2)
