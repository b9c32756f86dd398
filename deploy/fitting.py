"""Fits the groups of a placement into the nodes of a cluster: a pure function.

A group is a replica, and all its bundles are on one node. Ray decides where a replica really starts. Groups that find
no node here would wait for ever there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deploy.placement import Group, Placement, Resources

_ROUNDING = 1e-6
"""Cores. Sums of fractions of cores may exceed the cores by this."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A group and its node."""

    group: Group
    node: Resources


@dataclass(frozen=True, slots=True)
class Fit:
    """The groups that have a node, and those that have none."""

    seats: tuple[Seat, ...]
    unplaced: tuple[Group, ...]
    left: tuple[Resources, ...]
    """The nodes with the cores and GPUs that nobody claims."""

    def on(self, node: str) -> tuple[Group, ...]:
        """The groups on a node."""
        return tuple(seat.group for seat in self.seats if seat.node.node == node)


def fit(placement: Placement, nodes: Sequence[Resources]) -> Fit:
    """Give each group the node that it fills best, the largest groups first.

    A group without a GPU prefers nodes without GPUs, and then the node with the most unclaimed cores.
    """
    gpus, cpus = [node.gpus for node in nodes], [node.cpus for node in nodes]
    seats: list[Seat] = []
    unplaced: list[Group] = []
    for group in sorted(placement.groups, key=lambda group: (-group.gpus, -group.cpus)):
        fitting = [
            index
            for index, node in enumerate(nodes)
            if node.has(group.node_resource) and gpus[index] >= group.gpus and cpus[index] + _ROUNDING >= group.cpus
        ]
        if not fitting:
            unplaced.append(group)
            continue
        occupied = gpus if group.gpus else [node.gpus for node in nodes]
        best = min(fitting, key=lambda index: (occupied[index], -cpus[index]))
        gpus[best] -= group.gpus
        cpus[best] = max(0.0, cpus[best] - group.cpus)
        seats.append(Seat(group, nodes[best]))
    left = tuple(replace(node, cpus=cpus[index], gpus=gpus[index]) for index, node in enumerate(nodes))
    return Fit(tuple(seats), tuple(unplaced), left)
