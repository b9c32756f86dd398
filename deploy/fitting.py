"""Fits the groups of a placement into the nodes of a cluster: a pure function.

A group is a replica. All its bundles are on one node, or on as few as possible if it may span nodes. Ray decides where
a replica really starts. Groups that find no node here would wait for ever there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.placement import Bundle, Group, Placement, Resources

_ROUNDING = 1e-6
"""Cores. Sums of fractions of cores may exceed the cores by this."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A group and its node, or the node of some of its bundles."""

    group: Group
    node: Resources
    bundles: tuple[int, ...]
    """Indices of the group's bundles that are there."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The groups that have a node, and those that have none."""

    seats: tuple[Seat, ...]
    unplaced: tuple[Group, ...]
    left: tuple[Resources, ...]
    """The nodes with the cores and GPUs that nobody claims."""

    def on(self, node: str) -> tuple[Group, ...]:
        """The groups with a bundle on a node."""
        return tuple(seat.group for seat in self.seats if seat.node.node == node)

    def node_of(self, role: str, replica: int, bundle: int) -> str | None:
        """The node of one bundle of a replica."""
        for seat in self.seats:
            if (seat.group.role, seat.group.replica) == (role, replica) and bundle in seat.bundles:
                return seat.node.node
        return None


def fit(placement: Placement, nodes: Sequence[Resources]) -> Fit:
    """Give each group the node that it fills best, the largest groups first.

    A group without a GPU prefers nodes without GPUs, and then the node with the most unclaimed cores. One that may span
    nodes, and fits into none, gives each node in turn as many bundles as fit, the nodes with the most room first.
    """
    left = _Left(nodes)
    seats: list[Seat] = []
    unplaced: list[Group] = []
    for group in sorted(placement.groups, key=lambda group: (-group.gpus, -group.cpus)):
        found = left.whole(group) or (left.in_parts(group) if group.spans_nodes else [])
        if not found:
            unplaced.append(group)
        for index, bundles in found:
            left.claim(index, [group.bundles[bundle] for bundle in bundles])
            seats.append(Seat(group, nodes[index], tuple(bundles)))
    return Fit(tuple(seats), tuple(unplaced), left.nodes())


_Part = tuple[int, Sequence[int]]
"""Index of a node, and indices of bundles that are there."""


class _Left:
    """What the nodes have left."""

    def __init__(self, nodes: Sequence[Resources]) -> None:
        self._nodes = nodes
        self._gpus, self._cpus = [node.gpus for node in nodes], [node.cpus for node in nodes]

    def nodes(self) -> tuple[Resources, ...]:
        """The nodes with the cores and GPUs that nobody claims."""
        amounts = zip(self._nodes, self._cpus, self._gpus, strict=True)
        return tuple(replace(node, cpus=cpus, gpus=gpus) for node, cpus, gpus in amounts)

    def whole(self, group: Group) -> list[_Part]:
        """The node of all bundles of a group; none if no node has room for them."""
        fitting = [
            index
            for index, node in enumerate(self._nodes)
            if node.has(group.node_resource)
            and self._gpus[index] >= group.gpus
            and self._cpus[index] + _ROUNDING >= group.cpus
        ]
        if not fitting:
            return []
        occupied = self._gpus if group.gpus else [node.gpus for node in self._nodes]
        best = min(fitting, key=lambda index: (occupied[index], -self._cpus[index]))
        return [(best, range(len(group.bundles)))]

    def in_parts(self, group: Group) -> list[_Part]:
        """The nodes of the bundles of a group, in order; none if there is no room for all of them."""
        parts: list[_Part] = []
        order = sorted(range(len(self._nodes)), key=lambda index: (-self._gpus[index], -self._cpus[index]))
        first = 0
        for index in order:
            if not self._nodes[index].has(group.node_resource):
                continue
            gpus, cpus, last = self._gpus[index], self._cpus[index] + _ROUNDING, first
            while last < len(group.bundles) and (bundle := group.bundles[last]).gpus <= gpus and bundle.cpus <= cpus:
                gpus, cpus, last = gpus - bundle.gpus, cpus - bundle.cpus, last + 1
            if last > first:
                parts.append((index, range(first, last)))
            first = last
        return parts if first == len(group.bundles) else []

    def claim(self, index: int, bundles: Sequence[Bundle]) -> None:
        """Take what some bundles claim from a node."""
        self._gpus[index] -= sum(bundle.gpus for bundle in bundles)
        self._cpus[index] = max(0.0, self._cpus[index] - sum(bundle.cpus for bundle in bundles))
