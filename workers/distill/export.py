"""Writes a draft's directory: its own weights, its configuration, its target's name, and the model card."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.distill.output import check_replaceable, replaced_directory
from workers.distill.student import Student, config_values
from workers.model.draft_card import VOCABULARY, WEIGHTS, DraftCard
from workers.model.target_ends import decoder_vocabulary_size


def export(student: Student, directory: Path, target_name: str, card: str, pictures: dict[str, bytes]) -> None:
    """Replace the draft's directory: configuration, description, weights in bfloat16, model card, pictures.

    Raises `ConfigurationError` where the directory holds something other than a draft.
    """
    check_replaceable(directory)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in student.own_parameters().items()
    }
    if student.vocabulary is not None:
        tensors[VOCABULARY] = student.vocabulary.to("cpu", torch.int32)
    with replaced_directory(directory, card, pictures) as scratch:
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        config = json.dumps(config_values(student) | {"dtype": "bfloat16"}, indent=2)
        (scratch / "config.json").write_text(config + "\n", encoding="utf-8")
        description(student, target_name).write(scratch)


def description(student: Student, target_name: str) -> DraftCard:
    """The description that is stored beside the weights."""
    config = student.module.config
    return DraftCard(
        target=target_name,
        target_vocabulary_size=decoder_vocabulary_size(config),
        hidden_size=int(config.hidden_size),
        layers=student.layers,
        vocabulary_size=None if student.vocabulary is None else len(student.vocabulary),
    )
