"""Reads a table of successors without the target's embedding, which such a table does not need."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core.config.base import with_home
from cluster.core.errors import ModelLoadError
from workers.model.draft_card import WEIGHTS, read_card
from workers.model.draft_shapes import TableShape
from workers.model.target_ends import decoder_vocabulary_size, read_config, read_tensors

logger = logging.getLogger(__name__)

_NAME = "successors"


def read_successors(directory: Path) -> NDArray[np.int32]:
    """The table [vocabulary, k] of a module of the kind `table`; see `SuccessorTable`. Raises `ModelLoadError`."""
    card = read_card(directory)
    where = f"draft directory {str(directory)!r}"
    if not isinstance(card.shape, TableShape):
        raise ModelLoadError(f"{where}: kind is {card.kind!r}; needed table")
    size = card.target_vocabulary_size
    table = read_tensors(directory / WEIGHTS).get(_NAME)
    if table is None or table.dtype is not torch.int32 or table.shape != (size, card.shape.successors):
        raise ModelLoadError(f"{where}: {WEIGHTS} must have {_NAME}, int32 {[size, card.shape.successors]}")
    if int(table.min()) < -1 or int(table.max()) >= size:
        raise ModelLoadError(f"{where}: {_NAME} must hold tokens below {size}, or -1")
    ordered = table.sort(dim=1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
        raise ModelLoadError(f"{where}: {_NAME} must not name a successor of a token twice")
    return table.numpy().copy()


def read_successors_for(target: Path, directory: Path) -> NDArray[np.int32] | None:
    """The table [vocabulary, k] of successors in `directory`, for the target in the directory `target`.

    `None`, with a warning, if the target's vocabulary has another size than the table's: drafts do without a table, and
    a directory with a packaged target's name may hold another model. Nothing is compared where the target's directory
    is not on this machine. Raises `ModelLoadError` if `directory` holds no valid table, or the target no valid
    `config.json`, and `ConfigurationError` for a target in the home of an unknown user.
    """
    target = with_home("target.path", str(target))
    if not (target / "config.json").is_file():
        return read_successors(directory)
    found = _vocabulary_size(target)
    wanted = read_card(directory).target_vocabulary_size
    if found == wanted:
        return read_successors(directory)
    logger.warning(
        "recycling begins with an empty table: target_vocabulary_size is %d for the draft %s and %d in the "
        "config.json of the target %s",
        wanted,
        directory,
        found,
        target,
    )
    return None


def _vocabulary_size(target: Path) -> int:
    """Number of tokens that the target in a directory writes, as its `config.json` says.

    `transformers` is asked only where the file leaves it to the model's family, because importing it takes seconds.
    """
    file = target / "config.json"
    try:
        values = json.loads(file.read_text("utf-8"))
        text = values.get("text_config") or values
        size = text.get("decoder_vocab_size") or text.get("vocab_size")
        if size is not None:
            return int(size)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"target.path: {file} is refused; it must be a JSON object with vocab_size") from error
    return decoder_vocabulary_size(read_config(target).get_text_config())
