"""The draft tree of one row while an EAGLE head expands it, with one pass for each depth (EAGLE-2, Li et al. 2024)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from cluster.core.drafting import DraftBudget
from cluster.core.tree import ROOT, TokenTree
from workers.draft.expansion.calibration import Calibration
from workers.draft.expansion.draft_node import DraftNode
from workers.draft.expansion.node_probabilities import estimate_children
from workers.draft.hidden.eagle_pass import EaglePiece
from workers.draft.hidden.eagle_session import EagleSession

LEAST_PASS_GAIN = 0.1
"""A depth is expanded if the path probabilities of its nodes sum to at least this."""


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
        self._known = torch.from_numpy(window.known_before(anchor).copy()).to(output.device)

    def add(self, found: Sequence[Sequence[tuple[int, float]]], calibration: Calibration) -> None:
        """Add the candidates below the nodes of the frontier: tokens and confidences, best first."""
        for node, candidates in zip(self.frontier, found, strict=True):
            for rank, (token, confidence) in enumerate(candidates):
                child = DraftNode(token, node, node.length + 1)
                child.rank, child.confidence = rank, confidence
                node.children.append(child)
                self.nodes.append(child)
            estimate_children(node, calibration, self.session.is_greedy)

    def best(self) -> list[DraftNode]:
        """The most probable nodes within the budget, parents before their children."""
        return sorted(self.nodes, key=lambda node: -node.path_probability)[: self.budget.max_nodes]

    def choose(self, depth: int, width: int, ends: Collection[int]) -> bool:
        """Make the best nodes of `depth` the frontier. Returns whether there are any that are worth a pass."""
        length = self.root.length + depth
        self.frontier = []
        if depth < self.budget.max_depth:
            chosen = [node for node in self.best() if node.length == length and node.token not in ends][:width]
            if sum(node.path_probability for node in chosen) >= LEAST_PASS_GAIN:
                self.frontier = chosen[: self._scratch - len(self._slots)]
        return bool(self.frontier)

    def piece(self) -> EaglePiece:
        """The frontier as a piece of a pass. Each node attends to committed tokens, its ancestors and itself."""
        used = len(self._slots)
        for node in self.frontier:
            self._slots[node] = len(self._slots)
        count = self._begin + len(self._slots)
        is_seen = torch.zeros(len(self.frontier), count, dtype=torch.bool, device=self._known.device)
        is_seen[:, : self._begin] = self._known
        for row, node in enumerate(self.frontier):
            is_seen[row, : max(0, self._begin - self._reach + node.length - self.root.length)] = False
            above: DraftNode | None = node
            while above is not None and above is not self.root:
                is_seen[row, self._begin + self._slots[above]] = True
                above = above.parent
        return EaglePiece(
            self._keys,
            self._values,
            self._begin + used,
            [node.token for node in self.frontier],
            [node.length - 2 for node in self.frontier],
            is_seen,
            range(len(self.frontier)),
        )

    def features(self) -> list[Tensor]:
        """The inputs of the frontier's nodes: the outputs of their parents."""
        return [self._outputs[node.parent] for node in self.frontier if node.parent is not None]

    def keep_outputs(self, outputs: Tensor) -> None:
        """Store the outputs [frontier, hidden size] of the frontier's nodes."""
        for node, output in zip(self.frontier, outputs, strict=True):
            self._outputs[node] = output

    def tree(self) -> tuple[TokenTree, tuple[float, ...]]:
        """The best nodes and their path probabilities. Each is followed by its most probable child."""
        chosen = set(self.best())
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        stack = [(self.root, ROOT)]
        while stack:
            node, index = stack.pop()
            if node is not self.root:
                tokens.append(node.token)
                parents.append(index)
                probabilities.append(node.path_probability)
                index = len(tokens) - 1
            children = (child for child in node.children if child in chosen)
            stack.extend((child, index) for child in sorted(children, key=lambda child: child.path_probability))
        return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities)
