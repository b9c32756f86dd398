"""The draft card: a section of the `config.json` beside a distilled draft's weights. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from cluster.core.drafting import Tap
from cluster.core.errors import ConfigurationError, ModelLoadError, shorten
from workers.model.draft_shapes import SHAPES, Shape, shape_from
from workers.model.public_shapes import PublicShape
from workers.model.weight_files import CONFIG, config_values

CARD = "pilotfish_draft"
"""The key in `config.json`, and the model type of a draft that is no language model. A directory with it holds a
distilled draft."""
EARLIER_CARD = "pilotfish_draft.json"
"""Name of the file with the card of a draft that an earlier version wrote."""
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
    """The sizes of its module; `None` for the kind `layers`, whose configuration has them."""
    tree: tuple[tuple[int, ...], ...] = ()
    """Nodes of a static draft tree, the best first, each as the ranks along its path; empty: the drafter chooses."""


@dataclass(frozen=True, slots=True)
class DraftCard(DraftDescription):
    """Describes a distilled draft and the target whose embedding and head it uses."""

    taps: tuple[int, ...] = ()
    shape: Shape | None = None

    def write(self, directory: Path) -> None:
        """Write the card into the `config.json` of the draft's directory, beside the configuration of a model there."""
        values = {"format_version": FORMAT_VERSION} | asdict(self)
        if not self.tree:
            del values["tree"]
        config = config_values(directory) if self.kind == LAYERS else {"model_type": CARD}
        text = json.dumps(config | {CARD: values}, indent=2)
        (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def is_distilled(directory: Path) -> bool:
    """Whether the directory holds a distilled draft, which cannot be loaded without its target."""
    return CARD in config_values(directory) or (directory / EARLIER_CARD).is_file()


def is_written_here(directory: Path) -> bool:
    """Whether the directory holds a draft that `pilotfish distill` wrote, in its own format or in a public one."""
    return is_distilled(directory) or config_values(directory).get(WRITER) == WRITTEN_BY


def read_card(directory: Path) -> DraftCard:
    """The card of a distilled draft. Raises `ModelLoadError`, which names the field."""
    card = _Section.read(directory)
    version = card.values.get("format_version")
    if version not in (1, FORMAT_VERSION):
        card.fail("format_version", version, f"1 or {FORMAT_VERSION}")
    target = card.values.get("target")
    if not isinstance(target, str):
        card.fail("target", target, "a name")
    layers = card.numbers("layers")
    whole, hidden = (card.count(field) for field in ("target_vocabulary_size", "hidden_size"))
    reduced = None if card.values.get("vocabulary_size") is None else card.count("vocabulary_size", most=whole)
    if version == 1:
        return DraftCard(target, whole, hidden, layers, reduced)
    kind, shape = _kind(card)
    tree = read_tree(card.file, card.values, "tree", card.prefix)
    return DraftCard(
        target, whole, hidden, layers, reduced, kind=kind, taps=card.numbers("taps"), shape=shape, tree=tree
    )


def read_tree(file: Path, values: Mapping[str, Any], key: str, prefix: str = "") -> tuple[tuple[int, ...], ...]:
    """The nodes of the static tree at a key of a file's values; none without it. Raises `ModelLoadError`.

    `prefix` begins the name of the key in errors.
    """
    section = _Section(file, values, prefix)
    found = values.get(key, [])
    wanted = f"at most {_MOST_NODES} lists of ranks below {_MOST_RANKS}, each after its parent"
    if not isinstance(found, list) or len(found) > _MOST_NODES:
        section.fail(key, found, wanted)
    known: dict[tuple[int, ...], None] = {(): None}
    for path in found:
        is_path = isinstance(path, list) and path and all(_is_count(one, least=0) for one in path)
        if not is_path or max(path) >= _MOST_RANKS or tuple(path[:-1]) not in known or tuple(path) in known:
            section.fail(key, path, wanted)
        known[tuple(path)] = None
    return tuple(known)[1:]


@dataclass(frozen=True, slots=True)
class _Section:
    """The values of a card, and where they are."""

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""
    """Begins the names of fields in errors."""

    @classmethod
    def read(cls, directory: Path) -> _Section:
        """The card in a directory. Raises `ModelLoadError`."""
        file, earlier = directory / CONFIG, directory / EARLIER_CARD
        values = config_values(directory).get(CARD)
        if values is None and earlier.is_file():  # an earlier version wrote the draft
            file, values = earlier, _read(earlier)
        if values is None and file is not earlier:
            raise ModelLoadError(
                f"draft directory {str(directory)!r}: it has no {CONFIG} with the key {CARD}, which describes a draft "
                "in Pilotfish's own format; it must be a directory that `pilotfish distill` wrote in this format"
            )
        if not isinstance(values, dict):
            cls(file, {}).fail(CARD if file is not earlier else "it", values, "an object")
        return cls(file, values, "" if file is earlier else f"{CARD}.")

    def numbers(self, field: str) -> tuple[int, ...]:
        found = self.values.get(field)
        if not isinstance(found, list) or not all(_is_count(number, least=0) for number in found):
            self.fail(field, found, "a list of layer numbers")
        return tuple(found)

    def count(self, field: str, most: int | None = None) -> int:
        found = self.values.get(field)
        if not _is_count(found) or (most is not None and found > most):
            self.fail(field, found, "at least 1" if most is None else f"null or between 1 and {most}")
        return int(found)

    def fail(self, field: str, found: object, wanted: str) -> NoReturn:
        """Raise `ModelLoadError` for the value of a field."""
        where = f"draft card {str(self.file)!r}: {self.prefix}{field}"
        raise ModelLoadError(f"{where} must be {wanted}, not {shorten(found)}")


def _read(file: Path) -> Any:
    """What a file has. Raises `ModelLoadError`."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"draft directory {str(file.parent)!r}: {file.name} cannot be read: {error}") from None


def _kind(card: _Section) -> tuple[str, Shape | None]:
    kind = card.values.get("kind")
    if kind == LAYERS:
        return LAYERS, None
    if not isinstance(kind, str) or kind not in SHAPES:
        card.fail("kind", kind, f"one of {', '.join((LAYERS, *SHAPES))}")
    try:
        return kind, shape_from(kind, card.values.get("shape"))
    except ConfigurationError as error:
        raise ModelLoadError(f"draft card {str(card.file)!r}: {card.prefix}{error}") from None


def _is_count(value: Any, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
