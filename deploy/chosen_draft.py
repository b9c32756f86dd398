"""What one draft, named by `draft.path` or by vLLM's `--speculative-config`, means in settings of drafting methods."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from cluster.core.config.draft_section import SELECTORS, DraftSection
from cluster.core.errors import ConfigurationError, ModelLoadError, shorten
from deploy.packaged_drafts import packaged_drafts
from workers.draft.registry import METHODS
from workers.model.draft_card import LAYERS
from workers.model.formats.hub import draft_description
from workers.model.formats.registry import find_format

_OPTION = "--speculative-config"
_METHODS = {
    "eagle": "eagle",
    "eagle3": "eagle",
    "dflash": "block",
    "dspark": "block",
    "medusa": "heads",
    "mtp": "mtp",
    "draft_model": "model",
    "ngram": "ngram",
    "suffix": "suffix",
}
"""vLLM's names of methods, and those of the methods here."""
_COUNTS = ("max_depth", "max_nodes")
"""Settings of the draft that `num_speculative_tokens` is both of."""
_LOOKUPS = ("ngram", "suffix")
_WITHOUT_MODEL = ("mtp", *_LOOKUPS)
"""Methods that need no model; the layer of `mtp` may be in the target's own checkpoint."""
_OLDER_MTP = ("deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "mimo_mtp")
"""Older names of vLLM for `mtp`, one for each family."""


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
    packaged = packaged_drafts().get(path)
    directory, sizes = draft_description(path, revision) if packaged is None else (packaged, None)
    found = find_format(directory, sizes)
    if found is None:
        if not (directory / "config.json").is_file():
            raise ModelLoadError(f"draft.path: {path!r} holds neither a draft nor a model: config.json is missing")
        return LAYERS
    return found[0].kind(found[1])


def from_speculative_config(text: str) -> list[str]:
    """The assignments that vLLM's option stands for, each `key=value`. Raises `ConfigurationError`.

    A draft has at most `num_speculative_tokens` nodes, as in vLLM, where all of them are one path.
    """
    try:
        given = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{_OPTION}: needed a JSON object; {error}") from None
    if not isinstance(given, dict):
        raise ConfigurationError(f"{_OPTION}: {shorten(given)} is refused; it must be a JSON object")
    return [f"{key}={json.dumps(value)}" for key, value in _assignments(dict(given))]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigurationError(
                f"{_OPTION} {key}: {shorten(found[key])} and {shorten(value)}; it must be set once"
            )
        found[key] = value
    return found


def _assignments(given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    given = {key: value for key, value in given.items() if value is not None}  # to vLLM, null is unset
    method, model, count = (given.pop(key, None) for key in ("method", "model", "num_speculative_tokens"))
    if method == "[ngram]" or (method is None and model in ("ngram", "[ngram]")):
        method = "ngram"
    method = "mtp" if method in _OLDER_MTP else method
    if method is not None and (not isinstance(method, str) or method not in _METHODS):
        raise _refused("method", method, f"one of {', '.join(_METHODS)}, or unset")
    if model is None and method not in _WITHOUT_MODEL:
        raise ConfigurationError(f"{_OPTION} model: it must be set, unless method is {' or '.join(_WITHOUT_MODEL)}")
    if method in _LOOKUPS and model not in (None, method, f"[{method}]"):
        raise _refused("model", model, f"unset; {method} drafts without a model")
    if method is not None:
        yield "draft.method", _METHODS[method]
    if method not in _LOOKUPS and model is not None:
        yield "draft.path", _text("model", model)
        if "revision" in given:
            yield "draft.revision", _text("revision", given.pop("revision"))
    if count is not None:
        most = min(_bounds(DraftSection, name)[1] for name in _COUNTS)
        yield from ((f"draft.{name}", _number("num_speculative_tokens", count, 1, most)) for name in _COUNTS)
    if method == "ngram":
        yield from _lookup_lengths(given.pop("prompt_lookup_max", None), given.pop("prompt_lookup_min", None))
    ranks = given.pop("draft_tensor_parallel_size", 1)
    if type(ranks) is not int or ranks != 1:
        raise _refused("draft_tensor_parallel_size", ranks, "1; drafts are made on one device")
    for key, value in given.items():
        raise _refused(key, value, "left out; no setting here means the same")


def _refused(key: str, value: object, bound: str) -> ConfigurationError:
    return ConfigurationError(f"{_OPTION} {key}: {shorten(value)} is refused; it must be {bound}")


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _refused(key, value, "a text that is not empty")
    return value


def _number(key: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _refused(key, value, f"a whole number from {least} to {most}")
    return value


def _bounds(section: type[BaseModel], name: str) -> tuple[int, int]:
    """The least and the largest value of a setting."""
    limits = section.model_fields[name].metadata
    least, most = (next(getattr(one, end) for one in limits if hasattr(one, end)) for end in ("ge", "le"))
    return least, most


def _lookup_lengths(most: Any, least: Any) -> Iterator[tuple[str, Any]]:
    """The lengths of suffixes that prompt lookup looks up. To vLLM, one that is unset is the other."""
    lengths = {}
    for name, value in (("max", most), ("min", least)):
        if value is not None:
            lengths[name] = _number(f"prompt_lookup_{name}", value, *_bounds(METHODS.get("ngram").settings, name))
    if len(lengths) == 2 and lengths["min"] > lengths["max"]:
        raise _refused("prompt_lookup_min", least, f"at most prompt_lookup_max, {most}")
    for length in lengths.values():
        yield from ((f"draft.ngram.{name}", lengths.get(name, length)) for name in ("max", "min"))
        return
