"""Which of a tree's guesses become the answer.

The coupled rule is all there is to lossless speculation here: the target has taken its own decision
at every node, so a guess is right or it is not. Other rules may be registered beside it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.core.errors import ConfigurationError
from cluster.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """A path of guesses that the target agrees with, and its own next token."""

    nodes: tuple[int, ...]
    """Indices into the tree, from the root's child down; empty when no guess was right."""
    tokens: tuple[int, ...]
    """The nodes' tokens and one more, the target's own: the correction, or the bonus below a leaf."""


class AcceptanceRule(Protocol):
    """Turns the target's decisions on a tree into what is accepted of it."""

    def __call__(self, tree: TokenTree, decisions: Sequence[int]) -> Accepted:
        """`decisions[0]` is the decision at the root, `decisions[i + 1]` the one at node `i`."""
        ...


_RULES: dict[str, AcceptanceRule] = {}


def register_rule(name: str) -> Callable[[AcceptanceRule], AcceptanceRule]:
    """Make a rule known by `name`. Raises `ValueError` for a name that is taken."""

    def register(rule: AcceptanceRule) -> AcceptanceRule:
        if name in _RULES:
            raise ValueError(f"acceptance rule {name!r} is registered already")
        _RULES[name] = rule
        return rule

    return register


def acceptance_rule(name: str = "coupled") -> AcceptanceRule:
    """The rule of that name. Raises `ConfigurationError`, which names the nearest one there is."""
    if name not in _RULES:
        nearest = difflib.get_close_matches(name, _RULES, n=1, cutoff=0.0)
        raise ConfigurationError(f"acceptance rule {name!r} is unknown; the nearest one is {nearest[0]!r}")
    return _RULES[name]


@register_rule("coupled")
def walk(tree: TokenTree, decisions: Sequence[int]) -> Accepted:
    """Descend while the decision is among the children; the last decision is the target's own token.

    Raises `ValueError` unless there is one decision for the root and one for each node.
    """
    if len(decisions) != len(tree) + 1:
        raise ValueError(f"{len(decisions)} decisions for a tree of {len(tree)} nodes and its root")
    nodes: list[int] = []
    tokens = [decisions[0]]
    node = tree.child(ROOT, tokens[-1])
    while node is not None:
        nodes.append(node)
        tokens.append(decisions[node + 1])
        node = tree.child(node, tokens[-1])
    return Accepted(tuple(nodes), tuple(tokens))
