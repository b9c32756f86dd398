"""The interface of acceptance rules, and the registry of all rules.

A rule decides which drafted tokens become part of the answer. The target has taken its own decision at every node of a
tree; the rule walks the tree from the root and accepts one path. A rule is one file of `workers.sampling.rules`: a
settings class and a factory decorated with `@register_rule(name, settings)`. `target.acceptance` selects it, and its
settings are the section `target.<name>`. These files do not import torch, since the settings are read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cluster.core.config.base import PluginSettings
from cluster.core.config.registry import Registry
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftDistribution
from cluster.core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted path of a tree, and the token that follows it."""

    nodes: tuple[int, ...]
    """Indices of the accepted nodes, from the root's child downwards; empty when no drafted token is accepted."""
    tokens: tuple[int, ...]
    """The nodes' tokens and one more: the correction after a rejection, or the bonus token below a leaf."""

    def until(self, ends: Collection[int]) -> Accepted:
        """Return this path cut after the first token that is one of `ends`, which is then the last token."""
        for count, token in enumerate(self.tokens[:-1]):
            if token in ends:
                return Accepted(self.nodes[:count], self.tokens[: count + 1])
        return self


@dataclass(frozen=True, slots=True)
class RootPosition:
    """The position that the decision at a tree's root is for."""

    seed: int = 0
    """The seed of the sequence."""
    position: int = 0
    """The absolute position in the sequence. A node at depth `d` (1 below the root) has the position `position + d`."""
    vocabulary_size: int = 1
    is_greedy: bool = False
    """Whether every decision is the most probable token, without sampling."""


class DrawnDrafts(Enum):
    """Which drafts a rule accepts more of if their tokens are drawn at random and their distributions are known."""

    NONE = "none"
    """No drafts: the rule does not read the distributions."""
    CHAIN = "chain"
    """Chains. The rule reads only the first child of each node."""
    TREE = "tree"
    """Trees."""


class AcceptanceRule(Protocol):
    """Accepts a path of a tree. The ranks of a tensor-parallel group must all accept the same path."""

    @property
    def is_lossless(self) -> bool:
        """Whether the output has the target's own distribution."""
        ...

    @property
    def needs_distribution(self) -> bool:
        """Whether `accept` needs `log_probabilities`. The target computes them for no other rule.

        They need the whole vocabulary, so with several ranks the first one walks the trees, for all of them.
        """
        ...

    def accept(
        self,
        tree: TokenTree,
        decisions: Sequence[int],
        root: RootPosition,
        log_probabilities: Tensor | None,
        distributions: Sequence[DraftDistribution],
    ) -> Accepted:
        """Accept a path of `tree`, which has `n` nodes.

        `decisions` are the target's tokens: `decisions[0]` after the root, `decisions[i + 1]` after node `i`. A
        decision is -1 where all logits are NaN or −inf; an accepted -1 fails the row. `log_probabilities`,
        float32 `[n + 1, vocabulary]` in the same order, are those of the distribution that the decisions are drawn
        from (after penalties, temperature, top-k, top-p and min-p), or `None` unless the rule needs them. In a greedy
        row they are those at temperature 1. `distributions` are those that the nodes' tokens were drawn from by the
        drafter: one per node, or none if all tokens are deterministic. Raises `ValueError` for a number of decisions
        other than `n + 1`, and for missing log-probabilities.
        """
        ...


Factory = Callable[[Any], AcceptanceRule]
"""Makes a rule from its own settings."""


@dataclass(frozen=True, slots=True)
class RulePlugin:
    """A registered acceptance rule."""

    settings: type[PluginSettings]
    """Class of the section `target.<name>`."""
    create: Factory
    drawn_drafts: DrawnDrafts = DrawnDrafts.NONE


RULES: Registry[RulePlugin] = Registry("target.acceptance", "workers.sampling.rules")

SettingsType = TypeVar("SettingsType", bound=PluginSettings)
RuleType = TypeVar("RuleType", bound=AcceptanceRule)


def register_rule(
    name: str, settings: type[SettingsType], drawn_drafts: DrawnDrafts = DrawnDrafts.NONE
) -> Callable[[Callable[[SettingsType], RuleType]], Callable[[SettingsType], RuleType]]:
    """Make the decorated factory known as `name`. Raises `ValueError` when the name is taken."""

    def add(create: Callable[[SettingsType], RuleType]) -> Callable[[SettingsType], RuleType]:
        RULES.register(name, RulePlugin(settings, create, drawn_drafts))
        return create

    return add


def create_rule(target: TargetSection) -> AcceptanceRule:
    """Create the rule that `target.acceptance` selects. Raises `ConfigurationError` for an unknown name."""
    plugin = RULES.get(target.acceptance)
    return plugin.create(target.settings(target.acceptance, plugin.settings))


def check_decisions(tree: TokenTree, decisions: Sequence[int]) -> None:
    """Raise `ValueError` unless there is one decision for the root and one for each node."""
    if len(decisions) != len(tree) + 1:
        raise ValueError(f"{len(decisions)} decisions for a tree of {len(tree)} nodes and its root")


def check_log_probabilities(log_probabilities: Tensor | None) -> Tensor:
    """Return the log-probabilities. Raises `ValueError` if there are none."""
    if log_probabilities is None:
        raise ValueError("log_probabilities: the rule needs them, found None")
    return log_probabilities


def longest_path(tree: TokenTree, is_accepted: Sequence[bool]) -> tuple[int, ...]:
    """The longest path from the root whose nodes are all accepted; among equally long ones the first in the tree."""
    lengths: list[int] = []  # of the accepted path down to each node; 0 if it is not accepted
    for node, parent in enumerate(tree.parents):
        above = 1 if parent == ROOT else lengths[parent] + 1 if lengths[parent] else 0
        lengths.append(above if is_accepted[node] else 0)
    longest = max(lengths, default=0)
    return tree.path(lengths.index(longest)) if longest else ()
