"""Families after RoBERTa: position 0 has the row of the embedding that follows the one for padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel


def adapt(model: PreTrainedModel) -> None:
    """Shift the positions that the embeddings are given. In a dense pass they count positions themselves."""
    for embeddings in _embeddings(model):
        embeddings.register_forward_pre_hook(_shifted, with_kwargs=True)


def longest(model: PreTrainedModel) -> int | None:
    """Longest sequence that the embeddings have positions for, in tokens; `None` for any other family."""
    lengths = (one.position_embeddings.num_embeddings - one.padding_idx - 1 for one in _embeddings(model))
    return min(lengths, default=None)


def _embeddings(model: PreTrainedModel) -> Iterator[Any]:
    names = ("create_position_ids_from_input_ids", "padding_idx", "position_embeddings")
    yield from (part for part in model.modules() if all(hasattr(part, name) for name in names))


def _shifted(embeddings: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if named.get("position_ids") is not None:
        named["position_ids"] = named["position_ids"] + embeddings.padding_idx + 1
    return arguments, named
