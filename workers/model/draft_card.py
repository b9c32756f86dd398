"""The draft card: a JSON file beside a distilled draft's weights that describes it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from cluster.core.drafting import Tap
from cluster.core.errors import ConfigurationError, ModelLoadError, shorten
from workers.model.draft_shapes import SHAPES, Shape, shape_from
from workers.model.public_shapes import PublicShape
from workers.model.weight_files import config_values

CARD = "pilotfish_draft.json"
"""Name of the file; a directory with it holds a distilled draft."""
FORMAT_VERSION = 2
"""Version 1 has neither `kind` nor `taps` nor `shape`: a model of its own layers."""
LAST_TAP = -1
"""The tap of the target's residual stream after its last layer."""
LAYERS = "layers"
"""The kind of a draft that is a language model of its own."""
WEIGHTS = "model.safetensors"
"""Name of the file with the draft's own weights; the embedding and the head are the target's."""
WRITER, WRITTEN_BY = "written_by", "pilotfish distill"
"""Marks the configuration of a draft that was written here in a public format."""
_MOST_NODES, _MOST_RANKS = 256, 16
"""Bounds of a static tree."""
VOCABULARY = "vocabulary"
"""Name of the tensor, int32 [vocabulary_size], with the tokens of a reduced head in ascending order."""


@dataclass(frozen=True, slots=True)
class DraftDescription:
    """Describes a draft of any format, and its target."""

    target: str
    """Name of the target."""
    target_vocabulary_size: int
    """Number of tokens of the target, and of rows of its embedding; 0 where a public draft does not tell it."""
    hidden_size: int
    """Width of the embedding, equal in target and draft."""
    layers: tuple[int, ...]
    """The target layers that initialized the draft; empty if it was initialized otherwise."""
    vocabulary_size: int | None
    """Number of tokens that the draft can propose; `None`: all of the target's."""
    kind: str = LAYERS
    """`layers`, `heads`, `eagle`, `block`, `mtp`, `exit` or `table`."""
    taps: tuple[Tap, ...] = ()
    """Taps of the target that it reads: tap `l` is the residual stream after `l` decoder layers."""
    shape: Shape | PublicShape | None = None
    """The sizes of its module; `None` for the kind `layers`, whose `config.json` has them."""
    tree: tuple[tuple[int, ...], ...] = ()
    """Nodes of a static draft tree, the best first, each as the ranks along its path; empty: the drafter chooses."""
    source: str = CARD
    """Name of the file that describes it."""


@dataclass(frozen=True, slots=True)
class DraftCard(DraftDescription):
    """Describes a distilled draft and the target whose embedding and head it uses."""

    taps: tuple[int, ...] = ()
    shape: Shape | None = None

    def write(self, directory: Path) -> None:
        """Write the card into the draft's directory."""
        values = asdict(self)
        del values["source"]
        if not self.tree:
            del values["tree"]
        text = json.dumps({"format_version": FORMAT_VERSION} | values, indent=2)
        (directory / CARD).write_text(text + "\n", encoding="utf-8")


def is_distilled(directory: Path) -> bool:
    """Whether the directory holds a distilled draft, which cannot be loaded without its target."""
    return (directory / CARD).is_file()


def is_written_here(directory: Path) -> bool:
    """Whether the directory holds a draft that `pilotfish distill` wrote, in its own format or in a public one."""
    return is_distilled(directory) or config_values(directory).get(WRITER) == WRITTEN_BY


def read_card(directory: Path) -> DraftCard:
    """The card of a distilled draft. Raises `ModelLoadError`, which names the field."""
    file = directory / CARD
    try:
        card = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"draft directory {str(directory)!r}: {CARD} cannot be read: {error}") from None
    if not isinstance(card, dict):
        raise _problem(file, "it", card, "an object")
    version = card.get("format_version")
    if version not in (1, FORMAT_VERSION):
        raise _problem(file, "format_version", version, f"1 or {FORMAT_VERSION}")
    target = card.get("target")
    if not isinstance(target, str):
        raise _problem(file, "target", target, "a name")
    layers = _numbers(file, card, "layers")
    whole, hidden = (_count(file, card, field) for field in ("target_vocabulary_size", "hidden_size"))
    reduced = None if card.get("vocabulary_size") is None else _count(file, card, "vocabulary_size", most=whole)
    if version == 1:
        return DraftCard(target, whole, hidden, layers, reduced)
    kind, shape = _kind(file, card)
    return DraftCard(
        target,
        whole,
        hidden,
        layers,
        reduced,
        kind=kind,
        taps=_numbers(file, card, "taps"),
        shape=shape,
        tree=read_tree(file, card, "tree"),
    )


def read_tree(file: Path, values: Mapping[str, Any], key: str) -> tuple[tuple[int, ...], ...]:
    """The nodes of the static tree at a key of a file's values; none without it. Raises `ModelLoadError`."""
    found = values.get(key, [])
    wanted = f"at most {_MOST_NODES} lists of ranks below {_MOST_RANKS}, each after its parent"
    if not isinstance(found, list) or len(found) > _MOST_NODES:
        raise _problem(file, key, found, wanted)
    known: dict[tuple[int, ...], None] = {(): None}
    for path in found:
        is_path = isinstance(path, list) and path and all(_is_count(one, least=0) for one in path)
        if not is_path or max(path) >= _MOST_RANKS or tuple(path[:-1]) not in known or tuple(path) in known:
            raise _problem(file, key, path, wanted)
        known[tuple(path)] = None
    return tuple(known)[1:]


def _kind(file: Path, card: dict[str, Any]) -> tuple[str, Shape | None]:
    kind = card.get("kind")
    if kind == LAYERS:
        return LAYERS, None
    if not isinstance(kind, str) or kind not in SHAPES:
        raise _problem(file, "kind", kind, f"one of {', '.join((LAYERS, *SHAPES))}")
    try:
        return kind, shape_from(kind, card.get("shape"))
    except ConfigurationError as error:
        raise ModelLoadError(f"draft card {str(file)!r}: {error}") from None


def _numbers(file: Path, card: dict[str, Any], field: str) -> tuple[int, ...]:
    found = card.get(field)
    if not isinstance(found, list) or not all(_is_count(number, least=0) for number in found):
        raise _problem(file, field, found, "a list of layer numbers")
    return tuple(found)


def _count(file: Path, card: dict[str, Any], field: str, most: int | None = None) -> int:
    found = card.get(field)
    if not _is_count(found) or (most is not None and found > most):
        raise _problem(file, field, found, "at least 1" if most is None else f"null or between 1 and {most}")
    return int(found)


def _is_count(value: Any, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _problem(file: Path, field: str, found: object, wanted: str) -> ModelLoadError:
    return ModelLoadError(f"draft card {str(file)!r}: {field} must be {wanted}, not {shorten(found)}")
