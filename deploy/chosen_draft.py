"""What one draft, named by `draft.path`, means in settings of drafting methods: its format chooses the method."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.core.config.draft_section import SELECTORS
from cluster.core.errors import ConfigurationError, ModelLoadError, shorten
from deploy.packaged_drafts import packaged_drafts
from workers.draft.registry import METHODS
from workers.model.draft_card import LAYERS
from workers.model.formats.eagle3_layout import PARALLEL_KEYS
from workers.model.formats.hub import draft_description
from workers.model.formats.registry import find_format
from workers.model.public_shapes import MASK_HIDDEN, Sizes
from workers.model.weight_files import config_values


def chosen_draft(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `draft.path` stands for: the method that its format needs, and that method's path.

    `values` are all settings, nested and unchecked; `given` those of them that were given together with the path, and
    not by a preset. Blocks while the configuration of a draft is fetched. Raises `ConfigurationError` where they name
    another method, and `ModelLoadError` for a draft that cannot be found.
    """
    draft = values.get("draft")
    path = draft.get("path") if isinstance(draft, Mapping) else None
    if not isinstance(draft, Mapping) or not isinstance(path, str) or not path:
        return {}
    revision = draft.get("revision")
    kind = _kind(path, revision if isinstance(revision, str) else None)
    fitting = [name for name, plugin in METHODS.items() if plugin.settings.draft_kind == kind]
    section = given.get("draft")
    names = [section.get(key.removeprefix("draft.")) for key in SELECTORS] if isinstance(section, Mapping) else []
    named = next((name for name in names if name), None)
    if isinstance(named, list | tuple) and len(named) == 1:
        named = named[0]
    if named is not None and named not in fitting:
        raise ConfigurationError(
            f"draft.path: {path!r} holds a draft for {' or '.join(fitting)}, and the method is set to "
            f"{shorten(named)}; set the path of one of several methods by its own key, such as draft.{fitting[0]}.path"
        )
    method = named or (kind if kind in fitting else fitting[0])
    found: dict[str, Any] = {"draft.method": method, f"draft.{method}.path": path}
    return found | ({} if revision is None else {f"draft.{method}.revision": revision})


def _kind(path: str, revision: str | None) -> str:
    """The kind of a draft; a directory with no format of drafts holds a model of its own."""
    directory, sizes = _description(path, revision)
    found = find_format(directory, sizes)
    if found is None:
        if not (directory / "config.json").is_file():
            raise ModelLoadError(f"draft.path: {path!r} holds neither a draft nor a model: config.json is missing")
        return LAYERS
    return found[0].kind(found[1])


def _description(path: str, revision: str | None) -> tuple[Path, Sizes | None]:
    """What tells the format of a draft, which may be a packaged one; see `draft_description`."""
    packaged = packaged_drafts().get(path)
    return draft_description(path, revision) if packaged is None else (packaged, None)


def is_parallel(path: str, revision: str | None) -> bool:
    """Whether one pass of a draft predicts all of its tokens: PARD, P-EAGLE, and blocks. Raises `ModelLoadError`."""
    directory, sizes = _description(path, revision)
    found = find_format(directory, sizes)
    if found is None:
        return any(config_values(directory).get(key) is not None for key in PARALLEL_KEYS)
    return found[0].kind(found[1]) == "block" or MASK_HIDDEN in found[1].sizes
