"""What one draft, named by `draft.path` or by vLLM's `--speculative-config`, means in settings of drafting methods."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from cluster.core.config.draft_section import SELECTORS, DraftSection
from cluster.core.errors import ConfigurationError, ModelLoadError, shorten
from deploy.packaged_drafts import packaged_drafts
from workers.draft.registry import METHODS
from workers.model.draft_card import LAYERS
from workers.model.formats.eagle3_layout import PARALLEL_KEYS
from workers.model.formats.hub import draft_description
from workers.model.formats.registry import find_format
from workers.model.public_shapes import MASK_HIDDEN, Sizes
from workers.model.weight_files import config_values

logger = logging.getLogger(__name__)

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
_PARALLEL = "parallel_drafting"
_WITHOUT_EFFECT = (
    *("attention_backend", "disable_padded_drafter_batch", "enforce_eager", "max_model_len", "moe_backend"),
    "use_local_argmax_reduction",
)
"""Keys of vLLM that say how it computes a draft, or up to what length of a text, and not which one."""
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


def _is_parallel(path: str, revision: str | None) -> bool:
    """Whether one pass of a draft predicts all of its tokens: PARD, P-EAGLE, and blocks. Raises `ModelLoadError`."""
    directory, sizes = _description(path, revision)
    found = find_format(directory, sizes)
    if found is None:
        return any(config_values(directory).get(key) is not None for key in PARALLEL_KEYS)
    return found[0].kind(found[1]) == _METHODS["dflash"] or MASK_HIDDEN in found[1].sizes


def from_speculative_config(text: str) -> list[str]:
    """The assignments that vLLM's option stands for, each `key=value`. Raises `ConfigurationError`.

    A draft has at most `num_speculative_tokens` nodes, as in vLLM, where all of them are one path. Keys that change
    nothing here are logged. With `parallel_drafting`, the configuration of the draft is fetched, which blocks, and
    `ModelLoadError` is raised for a draft that cannot be found.
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
        revision = _text("revision", given.pop("revision")) if "revision" in given else None
        yield "draft.path", _text("model", model)
        if revision is not None:
            yield "draft.revision", revision
        if given.get(_PARALLEL) is True and _is_parallel(model, revision):
            del given[_PARALLEL]
    if count is not None:
        most = min(_bounds(DraftSection, name)[1] for name in _COUNTS)
        yield from ((f"draft.{name}", _number("num_speculative_tokens", count, 1, most)) for name in _COUNTS)
    if method == "ngram":
        yield from _lookup_lengths(given.pop("prompt_lookup_max", None), given.pop("prompt_lookup_min", None))
    _check_others(given)


def _check_others(given: dict[str, Any]) -> None:
    """Log the keys that change nothing here. Raises `ConfigurationError` for other ones."""
    ranks, parallel = given.pop("draft_tensor_parallel_size", 1), given.pop(_PARALLEL, False)
    if type(ranks) is not int or ranks != 1:
        raise _refused("draft_tensor_parallel_size", ranks, "1; drafts are made on one device")
    if parallel is not False:
        raise _refused(_PARALLEL, parallel, "false or unset; one pass makes drafts of PARD, P-EAGLE and blocks alone")
    for key, value in given.items():
        if key not in _WITHOUT_EFFECT:
            raise _refused(key, value, "left out; no setting here means the same")
    for key, value in given.items():
        logger.warning("%s %s: %s is ignored; it changes nothing here", _OPTION, key, shorten(value))


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
