"""Settings of drafting modules that were trained for the target: weights, memory, trees, and what they read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from cluster.core.config.base import UNSHARED, PluginSettings
from cluster.core.config.draft_section import DraftModuleSection, DraftSection
from cluster.core.drafting import EvidenceNeeds
from workers.draft.common.modules.ranked_paths import TreeForm
from workers.model.formats.registry import read_draft
from workers.model.fused_taps import fused_width

Weights = Literal["auto", "float32", "bfloat16", "int8", "int4"]
"""The types that a module's weights can be stored in."""

LEAST_SEQUENCES = 256
"""The least default of `ContextSettings.sequences`."""
_MOST_CANDIDATES = 16

TreePath = Annotated[tuple[Annotated[int, Field(ge=0, lt=_MOST_CANDIDATES)], ...], Field(min_length=1, max_length=64)]
Tree = Literal["auto"] | Annotated[tuple[TreePath, ...], Field(min_length=1, max_length=256)]


class ModuleSettings(DraftModuleSection):
    """A module that was trained for the target."""

    weights: Weights = "auto"
    """Type that the module's weights are stored in. `auto` is int8 on a CPU that multiplies integers (AMX, VNNI), else
    bfloat16; int4 has a scale and a minimum for each 32 inputs. A public draft's first
    matrix, which reads states of several layers, and all of a GPU's are bfloat16 in place of int8 and int4."""


class ContextSettings(PluginSettings):
    """The memory for keys and values that are made from the target's hidden states."""

    sequences: Annotated[Annotated[int, Field(ge=1, le=1 << 22)] | None, UNSHARED] = None
    """Most sequences whose keys and values are kept; beyond it, the least recently used one is sent again. Unset: as
    many as `target.replicas` or `target.autoscaling.max_replicas` targets run at once, at least 256. In the chart
    without autoscaling, set it if the targets' pods run more together: only Ray Serve knows their number there."""
    store_tokens: Annotated[int, Field(ge=0, le=1 << 24)] = 1 << 15
    """Most tokens whose keys and values are kept for later sequences with the same beginning; 0 keeps none."""

    @property
    def kept_sequences(self) -> int:
        """`sequences`, or the least default where no setting of targets implies it."""
        return self.sequences or LEAST_SEQUENCES


class ContextModuleSettings(ModuleSettings, ContextSettings):
    """A module that keeps keys and values made from the target's hidden states, and the memory for them."""


class TreeSettings(DraftModuleSection):
    """The form of the trees of a module that predicts all depths at once."""

    candidates: Annotated[int, Field(ge=1, le=_MOST_CANDIDATES)] = 8
    """Most candidates below one node, if `tree` lists no nodes."""
    tree: Tree | None = None
    """Nodes that a tree may have, each as the ranks along its path: `[[0], [1], [0, 0]]` is the best and the second
    candidate, and the best one after the best. `auto` drafts the nodes of the highest estimated probability; unset: the
    static tree of the module's card, else `auto`."""

    @field_validator("tree")
    @classmethod
    def _check(cls, tree: Tree | None) -> Tree | None:
        paths = () if tree is None or tree == "auto" else tree
        for path in paths:
            if len(path) > 1 and path[:-1] not in paths:
                raise ValueError(f"tree: {list(path)} needs its parent {list(path[:-1])}")
        return tree

    def form(self, draft: DraftSection) -> TreeForm:
        """The form of the trees.

        Of the tree of a card, it has as many nodes as `draft.max_nodes`; one with fewer nodes is not used.
        """
        nodes = () if self.tree == "auto" else self.tree
        if nodes is None:
            nodes = read_draft(Path(self.path), self.taps).tree[: draft.max_nodes]
            nodes = nodes if len(nodes) == draft.max_nodes else ()
        if not nodes:
            return TreeForm(self.candidates)
        return TreeForm(1 + max(rank for path in nodes for rank in path), frozenset(nodes))


def needs_of_module(settings: DraftModuleSection) -> EvidenceNeeds:
    """What the target must show to a module: the hidden states at its taps, or what the module fuses them to."""
    card = read_draft(Path(settings.path), settings.taps)
    return EvidenceNeeds(taps=card.taps, fusion="" if fused_width(card) is None else settings.path)
