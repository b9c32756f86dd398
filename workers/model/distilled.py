"""Loads a distilled draft: its own layers between the target's embedding and the target's head.

The draft of an encoder-decoder target has decoder layers of its own, and the target's encoder. What is the target's was
frozen during distillation, so it is read from the target's directory, and a shipped draft contains only its layers. If
the draft has a reduced vocabulary, the head retains only the rows of its tokens.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.core.errors import ConfigurationError, ModelLoadError
from workers.forward.attention import ATTENTION_NAME
from workers.model.draft_card import LAYERS, VOCABULARY, WEIGHTS, DraftCard, DraftDescription, read_card
from workers.model.stretch import read_stretch
from workers.model.target_ends import (
    ModelOutline,
    check_config,
    outline,
    read_shared_ends,
    read_shared_with_encoder,
    read_tensors,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DistilledDraft:
    """A distilled draft with the target's embedding and head in place."""

    module: PreTrainedModel
    vocabulary: torch.Tensor | None
    """The token of each row of the head, int64, ascending, on the module's device; `None`: all tokens."""


def load_distilled_draft(
    directory: Path,
    target: Path | None,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: str = ATTENTION_NAME,
) -> DistilledDraft:
    """Load a draft of this configuration from its own directory and its target's.

    `attention` is the name of the attention function in `transformers`. Raises `ConfigurationError` without a target,
    and `ModelLoadError`, which names the field or the tensor, if a directory does not match the draft card.
    """
    if target is None:
        raise ConfigurationError(
            f"draft.model.path: {directory.name!r} is a distilled draft, which needs the directory of its target"
        )
    card, tensors, vocabulary = read_draft_files(directory, config)
    stretch = read_stretch(target)
    name = target.name if stretch is None else stretch.original
    if card.target != name:
        logger.warning("the draft %s was distilled from %s, the target is %s", directory.name, card.target, name)
    skeleton = outline(config)
    if config.is_encoder_decoder:
        tensors |= read_shared_with_encoder(target, card)
    else:
        ends = {key: values for key, values in read_shared_ends(target, card).tensors.items() if key[0] != "norm"}
        config = deepcopy(config)
        config.tie_word_embeddings = not any(end == "head" for end, _ in ends)
        for (end, parameter), values in ends.items():
            tensors[f"{skeleton.embedding if end == 'embedding' else skeleton.head}.{parameter}"] = values
    module: PreTrainedModel = skeleton.kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=attention,
    )
    if vocabulary is not None:
        _reduce_head(module, vocabulary)
    return DistilledDraft(module, None if vocabulary is None else vocabulary.to(device))


def read_draft_files(
    directory: Path, config: PreTrainedConfig
) -> tuple[DraftCard, dict[str, torch.Tensor], torch.Tensor | None]:
    """Read the contents of a draft's directory: its card, its parameters, its vocabulary (see `DistilledDraft`).

    Raises `ModelLoadError`, which names the field or the tensor, if its directory does not match the draft card.
    """
    card = read_card(directory)
    if card.kind != LAYERS:
        raise ModelLoadError(
            f"draft directory {str(directory)!r}: kind is {card.kind!r}; it is no language model and "
            f"needs the drafting method of its kind"
        )
    check_config(directory, "its config.json", config, card)
    # Copies: the file may be changed in place while the draft is served.
    tensors = {name: value.clone() for name, value in read_tensors(directory / WEIGHTS).items()}
    vocabulary = draft_vocabulary(directory, tensors.pop(VOCABULARY, None), card)
    _check_own(directory, tensors, outline(config))
    return card, tensors, vocabulary


def draft_vocabulary(directory: Path, tokens: torch.Tensor | None, card: DraftDescription) -> torch.Tensor | None:
    """Check the tensor `vocabulary` of a draft's file. Returns it as int64, or `None` where the card names no size."""
    if card.vocabulary_size is None and tokens is None:
        return None
    where = f"draft directory {str(directory)!r}: tensor {VOCABULARY!r}"
    if card.vocabulary_size is None or tokens is None:
        raise ModelLoadError(f"{where} must be present if and only if its card has vocabulary_size")
    if tokens.dtype is not torch.int32 or tokens.shape != (card.vocabulary_size,):
        raise ModelLoadError(f"{where} must be int32 [{card.vocabulary_size}], not {tokens.dtype} {list(tokens.shape)}")
    tokens = tokens.long()
    if bool((tokens.diff() <= 0).any()) or int(tokens[0]) < 0 or int(tokens[-1]) >= card.target_vocabulary_size:
        raise ModelLoadError(f"{where} must hold ascending token ids from 0 to {card.target_vocabulary_size - 1}")
    return tokens


def _check_own(directory: Path, tensors: dict[str, torch.Tensor], skeleton: ModelOutline) -> None:
    """Check that the file holds exactly the draft's own parameters."""
    wanted = {name: shape for name, shape in skeleton.shapes.items() if skeleton.is_own(name)}
    where = f"draft directory {str(directory)!r}: {WEIGHTS}"
    if tensors.keys() != wanted.keys():
        missing, strange = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise ModelLoadError(f"{where} lacks {missing[:3] or 'nothing'} and has {strange[:3] or 'nothing'} in excess")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelLoadError(f"{where}: {name} must be {list(shape)}, not {list(tensors[name].shape)}")


def _reduce_head(module: PreTrainedModel, vocabulary: torch.Tensor) -> None:
    """Reduce the head to the rows of `vocabulary`. A head that was tied to the embedding becomes separate."""
    head = module.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelLoadError(f"model type {module.config.model_type!r}: its head is not a linear layer")
    bias = head.bias
    with torch.device("meta"):
        reduced = nn.Linear(head.in_features, len(vocabulary), bias=bias is not None)
    rows = vocabulary.to(head.weight.device)
    reduced.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if bias is not None:
        reduced.bias = nn.Parameter(bias.detach()[rows], requires_grad=False)
    module.set_output_embeddings(reduced)
    offsets = getattr(module, "final_logits_bias", None)  # [1, tokens] of BART and MarianMT
    if offsets is not None:
        module.final_logits_bias = offsets[:, rows]
    module.config.tie_word_embeddings = False
