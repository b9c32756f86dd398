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
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from cluster.core.config.base import PluginSettings
from cluster.core.config.registry import Registry
from cluster.core.config.target_section import TargetSection
from cluster.core.drafting import DraftDistribution
from cluster.core.tree import ROOT, TokenTree
from workers.sampling.context import DecisionContext

if TYPE_CHECKING:
    from torch import Tensor

    from workers.transfer import HostCopies


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

    def decided(self) -> Accepted:
        """Return this path without a last token of -1, which nobody could decide: the next row's root decides again."""
        return Accepted(self.nodes[:-1], self.tokens[:-1]) if self.tokens[-1] == -1 else self


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


@dataclass(frozen=True, slots=True, eq=False)
class DecidedTree:
    """A drafted tree of `n` nodes, and what the target showed at its root and nodes.

    Raises `ValueError` for a number of decisions other than `n + 1`.
    """

    tree: TokenTree
    decisions: Sequence[int]
    """The target's tokens: `decisions[0]` after the root, `decisions[i + 1]` after node `i`. A decision is -1 where all
    logits are NaN or −inf. An accepted -1 is left out of the verdict, and fails the row if no token precedes it."""
    root: RootPosition = RootPosition()
    log_probabilities: Tensor | None = None
    """Float32 `[n + 1, vocabulary]` in the order of the decisions, of the distribution that they are drawn from (after
    penalties, temperature, top-k, top-p and min-p), in a greedy row at temperature 1; `None` unless the rule needs
    them."""
    distributions: Sequence[DraftDistribution] = ()
    """What the drafter drew the nodes' tokens from: one distribution per node, or none if all are deterministic."""

    def __post_init__(self) -> None:
        if len(self.decisions) != len(self.tree.tokens) + 1:
            raise ValueError(f"{len(self.decisions)} decisions for a tree of {len(self.tree)} nodes and its root")

    @property
    def known_log_probabilities(self) -> Tensor:
        """The log-probabilities. Raises `ValueError` if there are none."""
        if self.log_probabilities is None:
            raise ValueError("log_probabilities: the rule needs them, found None")
        return self.log_probabilities

    def check_log_probabilities(self) -> None:
        """Raise `ValueError` if there are none."""
        _ = self.known_log_probabilities

    def accepted(self, nodes: Sequence[int], last: int | None = None) -> Accepted:
        """The path `nodes` as accepted, and the token `last` after it: if unset, the target's decision there."""
        decided = self.decisions[(nodes or (ROOT,))[-1] + 1]
        return Accepted(tuple(nodes), (*(self.tree.tokens[node] for node in nodes), decided if last is None else last))

    def without_excluded(self, accepted: Accepted, contexts: Sequence[DecisionContext]) -> Accepted:
        """Cut an accepted path before the first token that the request excludes. The decision takes its place.

        `contexts` `[n + 1]` are those of the decisions, in their order.
        """
        path = zip((ROOT, *accepted.nodes), accepted.tokens, strict=True)
        for depth, (above, token) in enumerate(path):
            if token >= 0 and contexts[above + 1].excludes(token):
                return self.accepted(accepted.nodes[:depth])
        return accepted

    def walk(self) -> Accepted:
        """Descend while the decision is among the children; the last decision is the token after the path."""
        nodes: list[int] = []
        last, decision = ROOT, self.decisions[0]
        # Parents come before their children, so those of the last node are yet to come.
        for node, (token, parent) in enumerate(zip(self.tree.tokens, self.tree.parents, strict=True)):
            if parent == last and token == decision:
                nodes.append(node)
                last, decision = node, self.decisions[node + 1]
        return self.accepted(nodes)


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

    @property
    def needs_distribution(self) -> bool:
        """Whether `accept` needs `log_probabilities`. The target computes them for no other rule.

        They need the whole vocabulary, so with several ranks the first one walks the trees, for all of them.
        """

    def accept(self, step: DecidedTree) -> Accepted:
        """Accept a path of the tree. Raises `ValueError` if log-probabilities are needed and missing."""


@runtime_checkable
class AcceptsTogether(AcceptanceRule, Protocol):
    """A rule that looks at all rows of a step together, so that the host waits for a GPU once or twice for all of them.

    The host waits for the tokens of a GPU in any case. What the rule looks up before arrives with them.
    """

    def launch(
        self, steps: Sequence[DecidedTree], log_probabilities: Tensor | None, copies: HostCopies
    ) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
        """Let the device look up what the rule needs. Returns a function that accepts a path of each tree.

        The trees come twice: now with decisions of -1, which are not known yet, and then with what is decided.
        `log_probabilities` are those of all steps, one after another. Raises `ValueError` if they are needed and
        missing.
        """


def accept_alone(rule: AcceptsTogether, step: DecidedTree) -> Accepted:
    """What a rule accepts of one tree."""
    from workers.transfer import HostCopies

    return rule.launch([step], step.log_probabilities, HostCopies())([step])[0]


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


def longest_path(tree: TokenTree, is_accepted: Sequence[bool]) -> tuple[int, ...]:
    """The longest path from the root whose nodes are all accepted; among equally long ones the first in the tree."""
    lengths: list[int] = []  # of the accepted path down to each node; 0 if it is not accepted
    for node, parent in enumerate(tree.parents):
        above = 1 if parent == ROOT else lengths[parent] + 1 if lengths[parent] else 0
        lengths.append(above if is_accepted[node] else 0)
    longest = max(lengths, default=0)
    return tree.path(lengths.index(longest)) if longest else ()
