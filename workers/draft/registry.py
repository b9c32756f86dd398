"""The interface of drafting methods, and the registry of all methods.

A method is one file of `workers.draft`: a settings class and a factory decorated with
`@register(name, settings)`. `draft.method` selects it, and its settings are the section `draft.<name>`. Files of that
package import torch only inside their factories, so that reading the settings stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from cluster.core.config.base import PluginSettings
from cluster.core.config.draft_section import DraftModuleSection, DraftSection
from cluster.core.config.registry import Registry
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DescribedMethod, EvidenceNeeds, Tap
from cluster.core.errors import ConfigurationError
from cluster.core.ports import DraftMethod
from workers.draft.common.combination import combined
from workers.forward.graph_sizes import drafting_graph_bytes
from workers.model.weight_files import is_encoder_decoder
from workers.sampling.acceptance import create_rule

Factory = Callable[[Any, DraftSection, TargetSection], DraftMethod]
"""Makes a method from its own settings, the common settings of drafting, and the target's settings."""


Placement = Literal["target", "drafter"]
"""Where a method drafts: on the target's rank 0, or in a process of its own."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where a method can draft."""

    order: tuple[Placement, ...] = ("drafter", "target")
    """All places, the preferred one first."""
    preferred: Callable[[TargetSection], Placement] | None = None
    """Computes the preferred place from the target; unset: the first of `order`."""
    on_every_rank: bool = False
    """Whether the method computes with the target's layers, so that it runs on all ranks of the target."""

    def best(self, target: TargetSection | None) -> Placement:
        """The preferred place."""
        return self.order[0] if self.preferred is None or target is None else self.preferred(target)


ON_TARGET_FIRST = Places(("target", "drafter"))
"""Places of a drafting method that takes less time than a remote call, or that reads the target's hidden states."""


@dataclass(frozen=True, slots=True)
class MethodPlugin:
    """A registered drafting method."""

    settings: type[PluginSettings]
    """Class of the section `draft.<name>`. One that derives from `DraftModelSection` loads a model."""
    create: Factory
    target_settings: Callable[[Any], Mapping[str, Any]] | None = None
    """Computes the settings of `target`, by dotted key, that the method needs; only a lossy method needs any."""
    needs: Callable[[Any], EvidenceNeeds] = lambda _: EvidenceNeeds()
    """Computes from the settings what the target must show to the method."""
    places: Places = Places()
    """Where the method can draft."""
    for_encoder_decoder: bool = True
    """Whether the method drafts for encoder-decoder targets."""

    @property
    def learns(self) -> bool:
        """Whether the method can be trained on what it drafts for: it is a `LearnsOnline`."""
        return self.settings.learns


METHODS: Registry[MethodPlugin] = Registry("draft.method", "workers.draft")

SettingsType = TypeVar("SettingsType", bound=PluginSettings)
MethodType = TypeVar("MethodType", bound=DraftMethod)


def register(
    name: str,
    settings: type[SettingsType],
    *,
    target_settings: Callable[[SettingsType], Mapping[str, Any]] | None = None,
    needs: Callable[[SettingsType], EvidenceNeeds] = lambda _: EvidenceNeeds(),
    places: Places = Places(),
    for_encoder_decoder: bool = True,
) -> Callable[
    [Callable[[SettingsType, DraftSection, TargetSection], MethodType]],
    Callable[[SettingsType, DraftSection, TargetSection], MethodType],
]:
    """Make the decorated factory known as `name`; the other parameters are the fields of a `MethodPlugin`.

    Raises `ValueError` when the name is taken.
    """

    def add(
        create: Callable[[SettingsType, DraftSection, TargetSection], MethodType],
    ) -> Callable[[SettingsType, DraftSection, TargetSection], MethodType]:
        METHODS.register(name, MethodPlugin(settings, create, target_settings, needs, places, for_encoder_decoder))
        return create

    return add


def create(draft: DraftSection, target: TargetSection) -> DraftMethod:
    """Create the methods that `draft.method` or `draft.methods` selects. This is slow where it loads weights.

    Raises `ConfigurationError` for an unknown name and for a method that does not draft for this kind of target, and
    the errors of the factories.
    """
    selected = _selected(draft)
    refused = [name for name, plugin in selected if not plugin.for_encoder_decoder]
    if refused and is_encoder_decoder(Path(target.path)):
        others = ", ".join(sorted(name for name, plugin in METHODS.items() if plugin.for_encoder_decoder))
        raise ConfigurationError(
            f"draft.method: {refused[0]} is refused for the encoder-decoder target {target.path!r}; it must be one of "
            f"{others}"
        )
    chosen = [(plugin, draft.settings(name, plugin.settings)) for name, plugin in selected]
    methods = [plugin.create(settings, draft, target) for plugin, settings in chosen]
    reads_hidden = [bool(plugin.needs(settings).taps) for plugin, settings in chosen]
    return combined(methods, reads_hidden, suspends=draft.controller == "auto")


def create_for_worker_rank(draft: DraftSection, target: TargetSection) -> DraftMethod | None:
    """Create those methods that compute with the target's layers, on a rank above 0; `None` without such a method.

    Raises the errors of the factories.
    """
    if not draft.is_colocated:
        return None
    shared = tuple(name for name, plugin in _selected(draft) if plugin.places.on_every_rank)
    return create(draft.model_copy(update={"methods": shared}), target) if shared else None


def needs_of(draft: DraftSection) -> EvidenceNeeds:
    """What the target must show to the selected methods."""
    needs = [plugin.needs(draft.settings(name, plugin.settings)) for name, plugin in _selected(draft)]
    top, decisions = max(one.top for one in needs), any(one.decisions for one in needs)
    readers = [one for one in needs if one.taps]
    if len(readers) == 1:
        return EvidenceNeeds(readers[0].taps, top, decisions, readers[0].fusion)
    taps = tuple(sorted({tap for one in readers for tap in one.taps}, key=_order))
    return EvidenceNeeds(taps, top, decisions)


def described(draft: DraftSection) -> tuple[DescribedMethod, ...]:
    """The selected methods with what they need, for clients of a drafter."""
    return tuple(
        DescribedMethod(name, plugin.needs(draft.settings(name, plugin.settings))) for name, plugin in _selected(draft)
    )


def describe_graphs(draft: DraftSection) -> list[str]:
    """The CUDA graphs of the selected methods, in words: a pure function of their settings."""
    return [
        f"CUDA graphs of draft.method={name}, captured when it is loaded, before the target's KV pool is sized: "
        f"{graphs}; larger passes are launched kernel by kernel"
        for name, plugin in _selected(draft)
        if (graphs := draft.settings(name, plugin.settings).graphs)
    ]


def graph_bytes(draft: DraftSection, vocabulary_size: int) -> int:
    """Bytes of a GPU that the CUDA graphs of the selected methods take at least, for a target with so many tokens.

    Raises `ModelLoadError` if a module has no card.
    """
    sections = (draft.settings(name, plugin.settings) for name, plugin in _selected(draft))
    return sum(drafting_graph_bytes(one.graph_logits(vocabulary_size)) for one in sections)


def check_standalone(draft: DraftSection) -> None:
    """Raise `ConfigurationError` if a selected method cannot draft for an engine that shows it tokens alone."""
    if draft.learn == "on":
        raise ConfigurationError("draft.learn: on is refused; another engine does not say whose texts it sends")
    for name, plugin in _selected(draft):
        if not draft.is_enabled:
            reason = "it drafts nothing"
        elif "drafter" not in plugin.places.order:
            reason = "it drafts only on the target"
        elif needed := _needed(draft, name, plugin):
            reason = f"it needs the target's {', '.join(needed)}, and another engine shows a drafter tokens alone"
        else:
            continue
        raise ConfigurationError(
            f"draft.method: {name} is refused; {reason}; choose one that reads tokens alone, as model or ngram"
        )


def placement_of(draft: DraftSection, target: TargetSection | None = None) -> Placement:
    """Where the selected methods draft, with `auto` settled.

    That is on the target if one of them must, or, unless there are several drafters, if drafts learn or all prefer it.
    What a method prefers may depend on the target, if it is given. Raises `ConfigurationError` if a method cannot draft
    at the configured place.
    """
    selected = _selected(draft)
    if not draft.is_enabled:
        return "drafter"
    if draft.placement == "auto":
        prefers_target = draft.replicas == 1 and (
            draft.learn == "on" or all(plugin.places.best(target) == "target" for _, plugin in selected)
        )
        needs_target = any(plugin.places.order == ("target",) for _, plugin in selected)
        place: Placement = "target" if prefers_target or needs_target else "drafter"
    else:
        place = draft.placement
    for name, plugin in selected:
        if place not in plugin.places.order:
            raise ConfigurationError(
                f"draft.placement: {place} is refused; {name} drafts only on the {plugin.places.order[0]}"
            )
    if place == "target" and draft.replicas > 1:
        raise ConfigurationError(f"draft.replicas: {draft.replicas} is refused; on the target there is one drafter")
    return place


def can_share_gpu(draft: DraftSection) -> bool:
    """Whether the drafting methods may draft on the target's rank 0 where no GPU is left for a draft model.

    That is so if a method loads a model whose device is not the CPU, if all methods can draft there, and if
    `draft.placement` and `draft.replicas` leave it open.
    """
    return (
        draft.weights is not None
        and draft.weights.device != "cpu"
        and (draft.placement, draft.replicas) == ("auto", 1)
        and all("target" in plugin.places.order for _, plugin in _selected(draft))
    )


def check_learning(draft: DraftSection, target: TargetSection) -> None:
    """Raise `ConfigurationError` if `draft.learn` is on with methods that cannot be trained while they draft.

    The same for an acceptance rule that accepts more than the target's decisions: then a text depends on its drafts, so
    it does not tell how many steps it takes with drafts of other weights.
    """
    if draft.learn == "off":
        return
    learning = ", ".join(sorted(name for name, plugin in METHODS.items() if plugin.learns))
    if len(selected := _selected(draft)) > 1 or not selected[0][1].learns:
        raise ConfigurationError(
            f"draft.learn: on is refused with {draft.name}; draft.method must be one of {learning}"
        )
    rule = create_rule(target)
    if not rule.is_lossless or rule.needs_distribution:
        raise ConfigurationError(
            f"draft.learn: on is refused with target.acceptance: {target.acceptance}, which accepts more than the "
            "target's decisions, so that no text tells how often other weights are right; it must be coupled"
        )


def _order(tap: Tap) -> int:
    """A place for each tap in the evidence, so that it does not depend on the order of methods."""
    return 1 << 16 if tap == "middle" else tap


def _needed(draft: DraftSection, name: str, plugin: MethodPlugin) -> tuple[str, ...]:
    """What a method needs of the target, in words. A module reads hidden states; its files may not be found yet."""
    if issubclass(plugin.settings, DraftModuleSection):
        return ("hidden states",)
    return plugin.needs(draft.settings(name, plugin.settings)).names


def _selected(draft: DraftSection) -> list[tuple[str, MethodPlugin]]:
    return [(name, METHODS.get(name)) for name in draft.selected("method")]
