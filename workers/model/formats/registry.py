"""The registry of the formats of drafts, and the reader of drafts of all formats.

A format is one file of this package with an object that is registered with `register`. The registry imports all files
of the package on first use. Cards need no torch, so these files import it only where they read tensors.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from cluster.core.drafting import Tap
from cluster.core.errors import ModelLoadError
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.public_shapes import Sizes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The weights of a draft. Ends that it does not have are the target's."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """The module's own tensors, by the names of its shape."""
    vocabulary: Tensor | None = None
    """The tokens of the head's rows, int64 [draft vocabulary], ascending; `None`: all tokens."""
    embedding: Tensor | None = None
    """[target vocabulary, hidden size]."""
    head: Tensor | None = None
    """[draft vocabulary, hidden size]."""


class DraftFormat(Protocol):
    """Reads the checkpoints of one format."""

    @property
    def name(self) -> str:
        """Name of the format."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint has this format. It reads names alone, so that `card` can say what is wrong."""

    def kind(self, checkpoint: Checkpoint) -> str:
        """The kind of the draft, which says what methods load it. Raises `ModelLoadError`."""

    def card(self, checkpoint: Checkpoint, taps: Sequence[Tap] = ()) -> DraftDescription:
        """Describe the draft. `taps` take the place of those that the checkpoint names.

        Raises `ModelLoadError` for a tensor of an unexpected name or size, and for a key that changes the arithmetic
        in a way that is not supported.
        """

    def weights(self, checkpoint: Checkpoint, card: DraftDescription) -> DraftWeights:
        """Read the tensors of a draft whose card was read. Raises `ModelLoadError`."""


@runtime_checkable
class NamesTensors(DraftFormat, Protocol):
    """A format whose files name the tensors of a module otherwise than its shape does."""

    def stored_name(self, checkpoint: Checkpoint, name: str) -> str:
        """The name in the files of the tensor that the shape calls `name`."""


_FORMATS: dict[str, DraftFormat] = {}
FormatType = TypeVar("FormatType", bound=DraftFormat)


def register(found: FormatType) -> FormatType:
    """Make a format known. Raises `ValueError` if its name is taken."""
    if found.name in _FORMATS:
        raise ValueError(f"draft format {found.name!r} is registered twice")
    _FORMATS[found.name] = found
    return found


def formats() -> tuple[DraftFormat, ...]:
    """All formats, by name."""
    package = __name__.rpartition(".")[0]
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{file.name}")
    return tuple(one for _, one in sorted(_FORMATS.items()))


def find_format(directory: Path, sizes: Sizes | None = None) -> tuple[DraftFormat, Checkpoint] | None:
    """The format of the draft in a directory; `None` if it holds none. Raises `ModelLoadError` for broken files.

    `sizes` are those of its tensors where the directory has only the configuration.
    """
    checkpoint = Checkpoint.read(directory, sizes)
    return next(((one, checkpoint) for one in formats() if one.recognises(checkpoint)), None)


def read_draft(directory: Path, taps: Sequence[Tap] = ()) -> DraftDescription:
    """Describe the draft in a directory. `taps` take the place of those that it names. Raises `ModelLoadError`."""
    found = _format_of(directory)
    return found[0].card(found[1], taps)


def read_weights(directory: Path, card: DraftDescription) -> DraftWeights:
    """Read the tensors of a draft with its card. Raises `ModelLoadError`."""
    found = _format_of(directory)
    return found[0].weights(found[1], card)


def with_stored_names(directory: Path, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors by the names that the files of the draft in a directory give them, from those of its shape.

    Raises `ModelLoadError` for broken files.
    """
    form, checkpoint = find_format(directory) or (None, None)
    if checkpoint is None or not isinstance(form, NamesTensors):
        return tensors
    return {form.stored_name(checkpoint, name): value for name, value in tensors.items()}


def _format_of(directory: Path) -> tuple[DraftFormat, Checkpoint]:
    found = find_format(directory)
    if found is None:
        known = ", ".join(one.name for one in formats())
        raise ModelLoadError(f"draft directory {str(directory)!r}: its format is unknown; known ones are {known}")
    return found
