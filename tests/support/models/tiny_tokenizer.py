"""Tiny tokenizers of the two kinds that causal models use, saved in the format of a model directory."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

END = "<|endoftext|>"
OPEN = "<|im_start|>"
CLOSE = "<|im_end|>"
SPECIALS = (END, OPEN, CLOSE)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'villain' %}{{ raise_exception('no villains') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_WORDS = ("he", "ll", "hell", "hello", "wo", "rl", "worl", "world", "th", "the", " t", " w", " h", "fish", "swim")


def byte_level(directory: Path, *, opens_texts: bool = False, **settings: object) -> Path:
    """Byte-level BPE as in GPT-2: ids 0-2 are special, then every byte, then a few words. Has no unknown tokens.

    With `opens_texts`, the special tokens that the tokenizer adds to a text are one before it; else it adds none.
    `settings` come into `tokenizer_config.json`.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: rank for rank, piece in enumerate((*SPECIALS, *alphabet))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        _learn(word.replace(" ", "Ġ"), vocabulary, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if opens_texts:
        opening = [(OPEN, vocabulary[OPEN])]
        tokenizer.post_processor = processors.TemplateProcessing(f"{OPEN} $A", f"{OPEN} $A $B", opening)
    return _save(tokenizer, directory, **settings)


def sentencepiece(directory: Path) -> Path:
    """SentencePiece as in Llama 2: ids 0-2 are special, then `<0x00>…`, then letters and words with `▁` for a space."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: rank for rank, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        _learn(word.replace(" ", "▁"), vocabulary, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, directory)


def _learn(word: str, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Add the merges that build a word letter by letter."""
    for length in range(2, len(word) + 1):
        left, right, whole = word[: length - 1], word[length - 1], word[:length]
        if whole not in vocabulary:
            vocabulary[whole] = len(vocabulary)
            merges.append((left, right))


def _save(tokenizer: Tokenizer, directory: Path, **changes: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": {"content": CLOSE}, "bos_token": OPEN, "chat_template": CHAT_TEMPLATE, **changes}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2]}), encoding="utf-8")
    return directory
