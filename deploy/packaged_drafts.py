"""The packaged drafts, and which of them a drafting method loads if its path is not set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.core.config.draft_section import DEFAULT_METHOD
from cluster.core.config.target_section import TargetSection
from workers.draft.registry import METHODS
from workers.model.draft_card import LAYERS, is_distilled, read_card

_KINDS = {"model": LAYERS, "blockwise": "heads", "recycling": "table", "early_exit": "exit"}
"""The kind of draft that a method loads, where it is not the method's name."""


def packaged_drafts() -> dict[str, Path]:
    """The directories of the packaged drafts, by name: the folders of `deploy/drafts` that hold a draft card."""
    folder = Path(__file__).parent / "drafts"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {directory.name: directory for directory in found if is_distilled(directory)}


def packaged_draft(method: str, target: str) -> str | None:
    """The name of the packaged draft that a drafting method loads for a target; `None` if there is none."""
    kind = _KINDS.get(method, method)
    name = Path(target.partition("@")[0]).name
    for packaged, directory in packaged_drafts().items():
        card = read_card(directory)
        if (card.kind, card.target) == (kind, name):
            return packaged
    return None


def implied_paths(values: Mapping[str, Any]) -> dict[str, str]:
    """The paths of packaged drafts for the selected drafting methods whose path is not set, as dotted overrides.

    `values` are all settings, nested and unchecked.
    """

    def given(key: str) -> Any:
        found: Any = values
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    target = given("target.path") or TargetSection.model_fields["path"].default
    selected = given("draft.methods") or [given("draft.method") or DEFAULT_METHOD]
    paths: dict[str, str] = {}
    for method in selected if isinstance(selected, list | tuple) else ():
        if not isinstance(method, str) or not isinstance(target, str) or method not in dict(METHODS.items()):
            continue
        key = f"draft.{method}.path"
        if "path" in METHODS.get(method).settings.model_fields and given(key) is None:
            name = packaged_draft(method, target)
            if name is not None:
                paths[key] = name
    return paths
