"""Which of a tree's guesses become the answer.

The coupled rule is all there is to lossless speculation here: the target has taken its own decision
at every node, so a guess is right or it is not. Other rules may be registered beside it: `synthetic`
accepts by chance, so that a system can be measured for drafts that nobody has trained yet.
"""

from __future__ import annotations

import difflib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from cluster.core.config import TargetSection
from cluster.core.errors import ConfigurationError
from cluster.core.tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """A path of guesses that the target agrees with, and its own next token."""

    nodes: tuple[int, ...]
    """Indices into the tree, from the root's child down; empty when no guess was right."""
    tokens: tuple[int, ...]
    """The nodes' tokens and one more, the target's own: the correction, or the bonus below a leaf."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the walk begins."""

    seed: int = 0
    """The sequence's own."""
    position: int = 0
    """The absolute position that the decision at the root is for."""
    vocabulary_size: int = 1


class AcceptanceRule(Protocol):
    """Turns the target's decisions on a tree into what is accepted of it; every rank must find the same."""

    @property
    def is_lossless(self) -> bool:
        """Whether the tokens are always the target's own decisions."""
        ...

    def __call__(self, tree: TokenTree, decisions: Sequence[int], place: Place) -> Accepted:
        """`decisions[0]` is the decision at the root, `decisions[i + 1]` the one at node `i`."""
        ...


RuleFactory = Callable[[TargetSection], AcceptanceRule]
"""Makes a rule as the target is configured. Raises `ConfigurationError`."""

_RULES: dict[str, RuleFactory] = {}


def register_rule(name: str) -> Callable[[RuleFactory], RuleFactory]:
    """Make a rule known by `name`. Raises `ValueError` for a name that is taken."""

    def register(factory: RuleFactory) -> RuleFactory:
        if name in _RULES:
            raise ValueError(f"acceptance rule {name!r} is registered already")
        _RULES[name] = factory
        return factory

    return register


def acceptance_rule(section: TargetSection) -> AcceptanceRule:
    """The rule that the target is told to follow. Raises `ConfigurationError`, which names the nearest one there is."""
    name = section.acceptance
    if name not in _RULES:
        nearest = difflib.get_close_matches(name, _RULES, n=1, cutoff=0.0)
        raise ConfigurationError(f"acceptance rule {name!r} is unknown; the nearest one is {nearest[0]!r}")
    return _RULES[name](section)


# --- the coupled rule -------------------------------------------------------------------------


def walk(tree: TokenTree, decisions: Sequence[int]) -> Accepted:
    """Descend while the decision is among the children; the last decision is the target's own token.

    Raises `ValueError` unless there is one decision for the root and one for each node.
    """
    _check_count(tree, decisions)
    nodes: list[int] = []
    tokens = [decisions[0]]
    node = tree.child(ROOT, tokens[-1])
    while node is not None:
        nodes.append(node)
        tokens.append(decisions[node + 1])
        node = tree.child(node, tokens[-1])
    return Accepted(tuple(nodes), tuple(tokens))


@dataclass(frozen=True, slots=True)
class Coupled:
    """A guess is accepted when it is what the target itself decides there."""

    is_lossless: bool = True

    def __call__(self, tree: TokenTree, decisions: Sequence[int], place: Place) -> Accepted:  # noqa: ARG002
        """See `walk`."""
        return walk(tree, decisions)


@register_rule("coupled")
def _coupled(section: TargetSection) -> Coupled:  # noqa: ARG001 - it has nothing to set
    return Coupled()


# --- the synthetic rule -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Synthetic:
    """NOT LOSSLESS: by chance, a position's token is not the target's decision but what a synthetic drafter guesses.

    The chance at depth `d` (1 below the root) is `rates[d - 1]`, the last rate below that. Draws and guesses belong to
    (seed, position) alone, so every rank finds the same, and with one rate so does every tree: the token after the
    last guess is one of those that a drafter may have run ahead with, too.
    """

    rates: tuple[float, ...]
    """At least one; each from 0 to 1."""
    is_lossless: bool = False

    def __call__(self, tree: TokenTree, decisions: Sequence[int], place: Place) -> Accepted:
        """Descend to first children by chance; then one more token, decided or guessed. Raises as `walk` does."""
        _check_count(tree, decisions)
        nodes: list[int] = []
        node = ROOT
        while self._agrees(place, len(nodes)):
            child = _first_child(tree, node)
            if child is None:
                last = synthetic_token(place.seed, place.position + len(nodes), place.vocabulary_size)
                break
            nodes.append(child)
            node = child
        else:
            last = decisions[node + 1]
        return Accepted(tuple(nodes), (*(tree.tokens[index] for index in nodes), last))

    def _agrees(self, place: Place, depth: int) -> bool:
        rate = self.rates[min(depth, len(self.rates) - 1)]
        return _hash(b"acceptance", place.seed, place.position + depth) < rate * 2.0**64


@register_rule("synthetic")
def _synthetic(section: TargetSection) -> Synthetic:
    if not section.acceptance_rates:
        raise ConfigurationError(
            "target.acceptance_rates: the synthetic rule needs one; draft.method: synthetic sets it"
        )
    return Synthetic(section.acceptance_rates)


def synthetic_token(seed: int, position: int, vocabulary_size: int) -> int:
    """What a synthetic drafter guesses at a position, whatever stands before it."""
    return _hash(b"guess", seed, position) % vocabulary_size


def _hash(purpose: bytes, seed: int, position: int) -> int:
    """64 bits; independent of the noise that decisions are made with."""
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def _first_child(tree: TokenTree, node: int) -> int | None:
    """The likeliest guess below `node`: drafters name it before its siblings."""
    return next((index for index in range(node + 1, len(tree)) if tree.parents[index] == node), None)


def _check_count(tree: TokenTree, decisions: Sequence[int]) -> None:
    if len(decisions) != len(tree) + 1:
        raise ValueError(f"{len(decisions)} decisions for a tree of {len(tree)} nodes and its root")
