"""A tiny tokenizer in the form of MarianMT's: two SentencePiece models that share one table of ids."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from tests.support.models import tiny

END, UNKNOWN, PADDING = "</s>", "<unk>", "<pad>"
FRENCH = (
    "une femme joue de la guitare",
    "deux hommes marchent dans la rue",
    "un chien court dans la neige",
    "un homme et une femme dans la rue",
)
ENGLISH = (
    "a woman plays the guitar",
    "two men walk in the street",
    "a dog runs in the snow",
    "a man and a woman in the street",
)
_PIECES = 42


def marian_tokenizer(directory: Path, vocabulary: int = 96) -> Path:
    """Write source.spm (French), target.spm (English) and vocab.json with `vocabulary` ids, the padding's the last."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces = {END: None, UNKNOWN: None}
    for name, sentences in (("source.spm", FRENCH), ("target.spm", ENGLISH)):
        model = _train(sentences)
        (directory / name).write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces |= {processor.id_to_piece(number): None for number in range(3, processor.vocab_size())}
    filled = [*pieces, *(f"filler{number}" for number in range(vocabulary - len(pieces) - 1)), PADDING]
    (directory / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(filled)}))
    languages = {"source_lang": "fr", "target_lang": "en"}
    (directory / "tokenizer_config.json").write_text(json.dumps(languages))
    return directory


def save_translator(directory: Path, family: str, **changes: Any) -> Path:
    """A tiny model of an encoder-decoder family with this tokenizer."""
    padding = 95
    ends = {"eos_token_id": 0, "pad_token_id": padding, "decoder_start_token_id": 0 if family == "bart" else padding}
    config = tiny.ENCODER_DECODER_FAMILIES[family](vocab_size=padding + 1, bos_token_id=3, **ends, **changes)
    return tiny.save(marian_tokenizer(directory, padding + 1), config)


def _train(sentences: Sequence[str]) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=written,
        vocab_size=_PIECES,
        model_type="unigram",
        num_threads=1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return written.getvalue()
