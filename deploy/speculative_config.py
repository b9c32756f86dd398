"""vLLM's option `--speculative-config` in settings of this project: each key is understood, or refused by its name."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from cluster.core.config.draft_section import DraftSection
from cluster.core.errors import ConfigurationError, shorten
from deploy.chosen_draft import is_parallel
from workers.draft.registry import METHODS

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
_OTHER_NAMES = {"[ngram]": "ngram", "ngram_gpu": "ngram"}
"""Further names of vLLM. One that ends in `_mtp` is `mtp` for one family of targets."""
_OTHER_METHODS = {
    "custom_class": "a class of your own is a drafting method here: deploy/docs/extending/drafting-method.md",
    "extract_hidden_states": "it drafts nothing, so leave the option out",
    "mlp_speculator": "its format is not read; `pilotfish distill --kind heads` trains heads for the target",
}
"""Methods of vLLM that are not here, and what to do instead."""
_COUNTS = ("max_depth", "max_nodes")
"""Settings of the draft that `num_speculative_tokens` is both of."""
_LOOKUPS = ("ngram", "suffix")
_WITHOUT_MODEL = ("mtp", *_LOOKUPS)
"""Methods that need no model; the layer of `mtp` may be in the target's own checkpoint."""
_PARALLEL, _CACHED = "parallel_drafting", "suffix_decoding_max_cached_requests"
_STANDARD_RULES = ("standard", "strict", "probabilistic")
"""vLLM's rules of acceptance that keep the target's distribution, as the usual one here does."""
_WITHOUT_EFFECT = (
    *("adaptive_verification", "attention_backend", "code_revision", "disable_eagle_block_drop"),
    *("disable_padded_drafter_batch", "draft_sample_method", "enable_adaptive_verification", "enforce_eager"),
    *("max_model_len", "moe_backend", "use_heterogeneous_vocab", "use_local_argmax_reduction"),
)
"""Keys of vLLM that say how it computes a draft, or up to what length of a text, and not which one: drafts are drawn
with the target's own noise, the controller sizes what is verified, and models of other vocabularies draft by text."""
_BY_LOAD = "left out; draft.controller=auto drafts fewer tokens while more requests run"
_AT_RATES = "left out; draft.method=synthetic accepts drafts at the rates draft.synthetic.acceptance"
_LOSSY = "left out; the lossy rule here is target.acceptance=typical"
_MOST_PROBABLE = "left out; trees have the most probable nodes, at most draft.max_nodes"
_INSTEAD = {
    "disable_by_batch_size": _BY_LOAD,
    "draft_load_config": "left out; draft.model.load_format says how a draft model is loaded",
    "dspark_draft_topk": "left out; draft.block.candidates bounds the candidates of a slot",
    "fly_entropy_threshold": _LOSSY,
    "fly_entropy_top_k": _LOSSY,
    "fly_window_size": _LOSSY,
    "kv_cache_dtype": "left out; a draft keeps keys and values in its own type",
    "num_speculative_tokens_per_batch_size": _BY_LOAD,
    "prompt_lookup_max": "left out, unless method is ngram",
    "prompt_lookup_min": "left out, unless method is ngram",
    "quantization": "left out; a checkpoint says how it is quantized, and draft.model.quantization takes fewer bits",
    "speculative_token_tree": _MOST_PROBABLE,
    _CACHED: "0 with method suffix, or left out; draft.suffix.store_tokens counts tokens",
    "suffix_decoding_max_spec_factor": _MOST_PROBABLE,
    "suffix_decoding_max_tree_depth": "left out; draft.suffix.max_match and draft.max_depth bound a match and a draft",
    "suffix_decoding_min_token_prob": _MOST_PROBABLE,
    "synthetic_acceptance_length": _AT_RATES,
    "synthetic_acceptance_rate": _AT_RATES,
    "synthetic_acceptance_rates": _AT_RATES,
    "tensor_parallel_size": "left out; the key is draft_tensor_parallel_size",
}
"""Keys that are refused, and what to do instead."""


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
    method = _method("ngram" if method is None and model in ("ngram", "[ngram]") else method)
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
        if given.get(_PARALLEL) is True and is_parallel(model, revision):
            del given[_PARALLEL]
    if count is not None:
        most = min(_bounds(DraftSection, name)[1] for name in _COUNTS)
        yield from ((f"draft.{name}", _number("num_speculative_tokens", count, 1, most)) for name in _COUNTS)
    if method == "ngram":
        yield from _lookup_lengths(given.pop("prompt_lookup_max", None), given.pop("prompt_lookup_min", None))
    if method == "suffix" and type(given.get(_CACHED)) is int and given[_CACHED] == 0:
        yield "draft.suffix.store_tokens", given.pop(_CACHED)
    yield from _rule(given.pop("rejection_sample_method", _STANDARD_RULES[0]), method)
    _check_others(given)


def _method(name: Any) -> str | None:
    """vLLM's usual name of a method that is here; `None` if it is unset. Raises `ConfigurationError`."""
    if name is None:
        return None
    advice = ""
    if isinstance(name, str):
        method = "mtp" if name.endswith("_mtp") else _OTHER_NAMES.get(name, name)
        if method in _METHODS:
            return method
        advice = f"; {_OTHER_METHODS[name]}" if name in _OTHER_METHODS else ""
    raise _refused("method", name, f"one of {', '.join(_METHODS)}, or unset{advice}")


def _rule(rule: Any, method: str | None) -> Iterator[tuple[str, str]]:
    """The acceptance rule. That of vLLM's usual one keeps the distribution, as the one here does."""
    if rule == "block" and method == "draft_model":
        yield "target.acceptance", "block"
    elif rule not in _STANDARD_RULES:
        bound = f"{_STANDARD_RULES[0]}, or block with method draft_model; target.acceptance names the rules here"
        raise _refused("rejection_sample_method", rule, bound)


def _check_others(given: dict[str, Any]) -> None:
    """Log the keys that change nothing here. Raises `ConfigurationError` for other ones."""
    ranks, parallel = given.pop("draft_tensor_parallel_size", 1), given.pop(_PARALLEL, False)
    if type(ranks) is not int or ranks != 1:
        raise _refused("draft_tensor_parallel_size", ranks, "1; drafts are made on one device")
    if parallel is not False:
        raise _refused(_PARALLEL, parallel, "false or unset; one pass makes drafts of PARD, P-EAGLE and blocks alone")
    for key, value in given.items():
        if key not in _WITHOUT_EFFECT:
            raise _refused(key, value, _INSTEAD.get(key, "left out; no setting here means the same"))
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
