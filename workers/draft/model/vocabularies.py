"""Compares the vocabulary of a draft model with that of its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError
from workers.draft.model.text_drafter import Tokenizers
from workers.forward.loaded_model import LoadedModel
from workers.model.target_ends import read_config
from workers.model.text_tokenizer import TextTokenizer, same_tokens
from workers.model.weight_files import is_encoder_decoder


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """What is known of the two vocabularies."""

    target_size: int | None = None
    """Tokens of the target's vocabulary; `None` where the target's directory is not on this machine."""
    tokenizers: Tokenizers | None = None
    """Set if the tokens of one mean nothing to the other, so that the draft model drafts by text."""


def compare_vocabularies(draft: LoadedModel, draft_directory: Path, target: TargetSection) -> Vocabularies:
    """Compare the tokenizers, or the sizes of the vocabularies where one has no tokenizer.

    Models of one family pad their embeddings differently: with the same tokenizer the sizes may differ, and the
    coordinator drops drafted tokens beyond the target's vocabulary. Nothing is compared where the target's directory is
    not on this machine. Raises `ConfigurationError` if the draft model can draft neither by tokens nor by text.
    """
    directory = Path(target.path)
    if not (directory / "config.json").is_file():
        return Vocabularies()
    size = int(read_config(directory).get_text_config().vocab_size)
    has_encoder = draft.source is not None or is_encoder_decoder(directory)
    is_same = same_tokens(directory, size, draft_directory, draft.vocabulary_size)
    if is_same or (has_encoder and size == draft.vocabulary_size):
        return Vocabularies(size)
    try:
        if has_encoder:
            raise ConfigurationError("one of them has an encoder")
        own, other = TextTokenizer.load(directory), TextTokenizer.load(draft_directory)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"the draft model {draft.name!r} has a vocabulary of {draft.vocabulary_size} tokens and the target "
            f"{directory.name!r} one of {size}, and it cannot draft by text: {error}; choose a draft with the target's "
            "tokenizer"
        ) from None
    return Vocabularies(size, Tokenizers(own, other, size, tuple(draft.eos_token_ids), draft.vocabulary_size))
