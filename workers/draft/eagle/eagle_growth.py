"""The draft tree of one row while an EAGLE head expands it, with one pass for each depth (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.core.drafting import DraftBudget
from workers.draft.common.trees.calibration import Calibration
from workers.draft.common.trees.draft_node import ChosenTree, DraftNode
from workers.draft.common.trees.node_probabilities import estimate_children
from workers.draft.eagle.eagle_session import EagleSession
from workers.draft.eagle.head_pass import EaglePiece
from workers.forward.native.window_layers import WindowPiece
from workers.sampling.allowed_tokens import allowed_at
from workers.sampling.context import Branch, DecisionContext

LEAST_PROBABILITY = 0.1
"""A depth is expanded if the path probabilities of its nodes sum to at least this."""


@dataclass(frozen=True, slots=True)
class GrowthLimits:
    """How widely the trees are expanded."""

    siblings: int
    """Most candidates below one node."""
    width: int
    """Most nodes of one tree that one pass expands."""


class EagleGrowth:
    """Nodes, and the slots in which the keys and values of expanded ones are written."""

    def __init__(self, session: EagleSession, output: Tensor, budget: DraftBudget, reach: int, scratch: int) -> None:
        """`output` is the head's output at the position before the last token; `reach`: see `committed_piece`."""
        self.session = session
        self.budget = budget
        self.root = DraftNode(session.tokens[-1], None, len(session.tokens))
        self.root.rank = 0 if session.is_streak else None
        self.nodes: list[DraftNode] = []
        self.frontier: list[DraftNode] = [self.root]
        """The nodes that the next candidates belong to."""
        self.root_output = output
        self._outputs: dict[DraftNode, Tensor] = {self.root: output}
        self._slots: dict[DraftNode, int] = {}
        self._scratch = scratch
        self._reach = reach
        window, anchor = session.window, session.anchor
        self._keys, self._values, self._begin = window.scratch(anchor, scratch)
        self._known = window.known_before(anchor).copy()
        self.is_short = True
        """Whether the tree has fewer nodes than the budget allows; it is then expanded whatever the gain."""
        self.gain = 0.0
        """Expected number of tokens that a pass for the frontier adds to the round."""

    def add(
        self, tokens: Sequence[Sequence[int]], confidences: Sequence[Sequence[float]], calibration: Calibration
    ) -> None:
        """Add the candidates below the nodes of the frontier, best first. A confidence of 0 is that of no candidate."""
        for node, below, shares in zip(self.frontier, tokens, confidences, strict=True):
            for rank, (token, confidence) in enumerate(zip(below, shares, strict=True)):
                if confidence <= 0.0:
                    break
                child = DraftNode(token, node, node.length + 1)
                child.rank, child.confidence = rank, confidence
                node.children.append(child)
                self.nodes.append(child)
            estimate_children(node, calibration, self.session.is_greedy)

    def best(self) -> list[DraftNode]:
        """The most probable nodes within the budget, parents before their children."""
        return sorted(self.nodes, key=lambda node: -node.path_probability)[: self.budget.max_nodes]

    def choose(self, depth: int, width: int, first_rate: float) -> bool:
        """Make the best nodes of `depth` the frontier. Returns whether there are any that are worth a pass.

        `first_rate` is the rate at which the target takes a first candidate.
        """
        self.frontier, self.gain = [], 0.0
        best, length = self.best(), self.root.length + depth
        self.is_short = len(best) < self.budget.max_nodes
        replaced = 0.0 if self.is_short else best[-1].path_probability  # by a new node of a full tree
        if depth < self.budget.max_depth:
            ends = self.session.start.sampling.end_token_ids
            open_nodes = (node for node in best if node.length == length and node.token not in ends)
            chosen = [node for node in open_nodes if node.path_probability * first_rate > replaced][:width]
            if sum(node.path_probability for node in chosen) >= LEAST_PROBABILITY:
                self.frontier = chosen[: self._scratch - len(self._slots)]
                self.gain = sum(node.path_probability * first_rate - replaced for node in self.frontier)
        return bool(self.frontier)

    def piece(self) -> EaglePiece:
        """The frontier as a piece of a pass. Each node attends to committed tokens, its ancestors and itself."""
        used, begin = len(self._slots), self._begin
        for node in self.frontier:
            self._slots[node] = len(self._slots)
        is_seen = np.zeros((len(self.frontier), begin + len(self._slots)), dtype=np.bool_)
        is_seen[:, :begin] = self._known
        for row, node in enumerate(self.frontier):
            is_seen[row, : max(0, begin - self._reach + node.length - self.root.length)] = False
            above: DraftNode | None = node
            while above is not None and above is not self.root:
                is_seen[row, begin + self._slots[above]] = True
                above = above.parent
        return EaglePiece(
            WindowPiece(self._keys, self._values, self._begin + used, len(self.frontier), torch.from_numpy(is_seen)),
            [node.token for node in self.frontier],
            [node.length - 2 for node in self.frontier],
            range(len(self.frontier)),
        )

    def contexts(self) -> list[DecisionContext]:
        """The contexts of the decisions below the nodes of the frontier."""
        start, tokens = self.session.start, self.session.tokens
        return [
            DecisionContext(
                start.sampling,
                Branch(tokens, node.path_tokens()),
                start.prompt_len,
                allowed_at(self.session.next_tokens, node.length - self.root.length),
            )
            for node in self.frontier
        ]

    def features(self) -> list[Tensor]:
        """The inputs of the frontier's nodes: the outputs of their parents."""
        return [self._outputs[node.parent] for node in self.frontier if node.parent is not None]

    def keep_outputs(self, outputs: Tensor) -> None:
        """Store the outputs [frontier, hidden size] of the frontier's nodes."""
        for node, output in zip(self.frontier, outputs, strict=True):
            self._outputs[node] = output

    def tree(self) -> ChosenTree:
        """The best nodes. Each is followed by its most probable child."""
        return self.root.chosen_tree(frozenset(self.best()))
