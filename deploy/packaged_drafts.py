"""The packaged drafts: which of them a drafting method loads if its path is not set, and what drafts by default."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any

from cluster.core.config.draft_section import DEFAULT_METHOD, NO_DRAFTS
from cluster.core.config.target_section import TargetSection
from workers.draft.registry import METHODS
from workers.model.draft_card import WEIGHTS, is_distilled, is_written_here, read_card
from workers.model.formats.registry import find_format
from workers.model.formats.speculators import verifier
from workers.model.packaged.catalogue import PACKAGED_MODELS
from workers.model.weight_files import config_values

INSTALL = "pip install pilotfish-drafts"
"""Installs the weights of the packaged drafts. Their cards come with Pilotfish itself."""
_MODEL = "model"


def packaged_drafts() -> dict[str, Path]:
    """The directories of the packaged drafts, by name: the folders of `deploy/drafts` that say what draft they hold."""
    folder = Path(__file__).parent / "drafts"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {directory.name: directory for directory in found if is_written_here(directory)}


def is_installed(directory: Path) -> bool:
    """Whether the weights of a packaged draft are beside what describes them."""
    return (directory / WEIGHTS).is_file()


def packaged_draft(method: str, target: str) -> str | None:
    """The name of the packaged draft that a drafting method loads for a target; `None` if there is none."""
    kind = METHODS.get(method).settings.draft_kind
    return next((name for name, found in drafts_of(target).items() if _about(found)[1] == kind), None)


def drafts_of(target: str) -> dict[str, Path]:
    """The directories of a target's packaged drafts, by name."""
    name = Path(target.partition("@")[0]).name
    return {packaged: found for packaged, found in packaged_drafts().items() if _about(found)[0] == name}


def _about(directory: Path) -> tuple[str, str]:
    """The target's name and the kind of a packaged draft, which are known without its weights."""
    if is_distilled(directory):
        card = read_card(directory)
        return card.target, card.kind
    found = find_format(directory, {})
    return ("", "") if found is None else (verifier(found[1]), found[0].kind(found[1]))


def translator_method(values: Mapping[str, Any]) -> str | None:
    """The drafting method for a translator for which nobody chose one; `None` for other targets.

    It is `model` if the target has a packaged draft that is installed, else `none`: the words of a translation do not
    repeat those of its source, so lookups find nothing. `values` are all settings, nested and unchecked.
    """
    target = _target(values)
    if not isinstance(target, str) or _given(values, f"draft.{_MODEL}.path") is not None or not _is_translator(target):
        return None
    name = packaged_draft(_MODEL, target)
    return NO_DRAFTS if name is None or not is_installed(packaged_drafts()[name]) else _MODEL


def _is_translator(target: str) -> bool:
    """Whether a target is a MarianMT model. Other encoder-decoder models may copy from their source."""
    known = PACKAGED_MODELS.get(target)
    if known is not None:
        return known.is_marian
    return config_values(Path(expanduser(target))).get("model_type") == "marian"


def implied_paths(values: Mapping[str, Any]) -> dict[str, str]:
    """The paths of packaged drafts for the selected drafting methods whose path is not set, as dotted overrides.

    A method that drafts without a path gets none where the draft is not installed. `values` are all settings, nested
    and unchecked.
    """
    target = _target(values)
    selected = _given(values, "draft.methods") or [_given(values, "draft.method") or DEFAULT_METHOD]
    paths: dict[str, str] = {}
    for method in selected if isinstance(selected, list | tuple) else ():
        if not isinstance(method, str) or not isinstance(target, str) or method not in dict(METHODS.items()):
            continue
        key = f"draft.{method}.path"
        if "path" in METHODS.get(method).settings.model_fields and _given(values, key) is None:
            name = packaged_draft(method, target)
            if name is not None and (needs_path(method) or is_installed(packaged_drafts()[name])):
                paths[key] = name
    return paths


def needs_path(method: str) -> bool:
    """Whether a drafting method cannot be selected without the path of its draft."""
    settings = METHODS.get(method).settings
    try:
        settings().check_selected()
    except ValueError:
        return "path" in settings.model_fields
    return False


def _target(values: Mapping[str, Any]) -> Any:
    return _given(values, "target.path") or TargetSection.model_fields["path"].default


def _given(values: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; `None` if it is not set."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
