"""Settings that follow from the drafting methods: the target's settings, its evidence, and where drafts are made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from cluster.core.config.sections import Configuration
from cluster.core.drafting import Tap
from cluster.core.errors import ConfigurationError, shorten
from workers.draft.common.modules.module_settings import LEAST_SEQUENCES, ContextSettings
from workers.draft.registry import METHODS, check_learning, needs_of, placement_of
from workers.model.weight_files import stated_layers
from workers.serve.configuration import load_configuration

NOT_LOSSLESS = (
    "NOT LOSSLESS: answers differ from what the model alone writes, because of target.acceptance, target.kv.window, "
    "target.kv.dtype or target.trial"
)
"""The notice that is printed when a target reports that it is not lossless (`TargetInfo.is_lossless`)."""


def with_implied_settings(configuration: Configuration) -> Configuration:
    """The configuration with the settings that the drafting methods imply. Applying it again changes nothing.

    `draft.placement` is then `target` or `drafter`. Raises `ConfigurationError` if a setting that a drafting method
    implies is chosen without it, or if a method cannot draft where `draft.placement` says.
    """
    draft = configuration.draft
    needs, place = needs_of(draft), placement_of(draft, configuration.target)
    check_learning(draft, configuration.target)
    # A draft that learns changes the weights with which a target would fuse.
    fusion = needs.fusion if place == "drafter" and draft.learn == "off" else ()
    most, sequences = configuration.scheduler.max_sequences, configuration.target.kv.sequences
    if sequences is not None and sequences < most:
        raise ConfigurationError(
            f"target.kv.sequences: {sequences} is refused; it must be at least scheduler.max_sequences ({most})"
        )
    implied: dict[str, Any] = {
        "target.kv.sequences": sequences or most,
        "target.kv.step_tokens": configuration.target.kv.step_tokens or configuration.scheduler.max_step_tokens,
        "draft.placement": place,
        "target.evidence.taps": _taps(configuration, needs.taps),
        "target.evidence.top": needs.top,
        "target.evidence.decisions": needs.decisions,
        "target.evidence.is_sent": needs.any and place == "drafter",
        "target.evidence.fusion": fusion or None,
        **_kept_sequences(configuration, place),
    }
    values = configuration.model_dump(mode="json")
    defaults = load_configuration({}).model_dump(mode="json")
    for name, plugin in METHODS.items():
        if plugin.target_settings is None:
            continue
        settings = plugin.target_settings(draft.settings(name, plugin.settings))
        settings = {f"target.{key}": value for key, value in settings.items()}
        if name in draft.selected("method"):
            implied |= settings
            continue
        for key, value in settings.items():
            # Another acceptance rule may be chosen freely, but no rule reads the settings of this method's rule.
            is_own = _at(values, key) == value or key.count(".") > 1
            if is_own and _at(values, key) != _at(defaults, key):
                raise ConfigurationError(f"{key}: {shorten(_at(values, key))} is refused; draft.method={name} sets it")
    return load_configuration(values, implied)


def _taps(configuration: Configuration, needed: tuple[Tap, ...]) -> tuple[Tap, ...]:
    """The taps that the target takes. A draft that learns from hidden states learns from the last layer's, too."""
    layers = stated_layers(Path(configuration.target.path))
    has_last = not needed or -1 in needed or layers in needed
    return needed if configuration.draft.learn == "off" or has_last else (*needed, -1)


def _kept_sequences(configuration: Configuration, place: str) -> dict[str, int]:
    """How many sequences the selected methods keep keys and values of, by their settings."""
    least, reason = _sequences_of_a_drafter(configuration, place)
    kept = {}
    for name in configuration.draft.selected("method"):
        section = configuration.draft.settings(name, METHODS.get(name).settings)
        if not isinstance(section, ContextSettings):
            continue
        if section.sequences is not None and section.sequences < least:
            raise ConfigurationError(
                f"draft.{name}.sequences: {section.sequences} is refused; it must be at least {reason}"
            )
        kept[f"draft.{name}.sequences"] = section.sequences or max(LEAST_SEQUENCES, least)
    return kept


def _sequences_of_a_drafter(configuration: Configuration, place: str) -> tuple[int, str]:
    """How many sequences run at once on one drafter, and that bound in words."""
    most, drafters = configuration.scheduler.max_sequences, configuration.draft.replicas
    targets = max(configuration.target.replicas, configuration.target.autoscaling.max_replicas)
    least = targets * -(-most // drafters)
    if place == "target" or least <= most:
        return most, f"scheduler.max_sequences ({most})"
    shared = "1 drafter" if drafters == 1 else f"{drafters} drafters"
    return least, (
        f"{least}, unless there are more draft.replicas: {targets} targets share {shared}, "
        f"each with scheduler.max_sequences ({most})"
    )


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key."""
    return reduce(lambda section, name: section[name], key.split("."), values)
