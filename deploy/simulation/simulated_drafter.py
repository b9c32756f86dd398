"""A simulated drafter: it stores sequences as drafters do, and agrees with the target with a given probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.drafting import DraftRow, Proposal, RowFault, RowFaultCode
from cluster.core.ids import SequenceId
from cluster.core.request import SequenceStart
from cluster.core.tree import ROOT, TokenTree
from deploy.simulation.hashed_model import HashedModel
from deploy.simulation.virtual_time import now


@dataclass(frozen=True, slots=True)
class DrafterSpeed:
    """How long proposals take, in seconds."""

    call_seconds: float = 0.0005
    row_seconds: float = 0.0
    depth_seconds: float = 0.0
    """Time per level of the deepest tree: one pass of a draft model."""
    token_seconds: float = 0.0
    """Time per committed token that the drafter has not seen."""
    level_row_seconds: float = 0.0
    """Time per level of the deepest tree and row."""

    def seconds(self, rows: int, depth: int, new_tokens: int) -> float:
        """The time of one call."""
        levels = depth * (self.depth_seconds + rows * self.level_row_seconds)
        return self.call_seconds + rows * self.row_seconds + levels + new_tokens * self.token_seconds


@dataclass(frozen=True, slots=True)
class DrafterSkill:
    """How good drafts are."""

    acceptance: float
    """The probability that the best child of a node is the target's token, given that the node is."""
    width: int = 1
    """Children of the root; further ones are right in half of the cases in which all earlier ones are wrong."""
    has_probabilities: bool = True
    """Whether proposals estimate their acceptance."""
    runs_ahead: bool = False
    """Whether it drafts on below its path while the target verifies, as `draft.model.mode: run_ahead` does. For other
    outcomes it drafts anew."""


@dataclass(slots=True)
class _Known:
    start: SequenceStart
    states: list[int] = field(default_factory=lambda: [HashedModel.first_state])
    foreseen: tuple[int, ...] = ()
    """The tokens below which it drafts ahead: its last path, and its guess of the target's token after that."""
    foreseen_at: float = 0.0
    """When it proposed that path, in virtual seconds."""


class SimulatedDrafter:
    """Drafts trees. Synchronous; it has the interface of `DraftMethod`."""

    def __init__(self, model: HashedModel, skill: DrafterSkill, speed: DrafterSpeed) -> None:
        self._model = model
        self._skill = skill
        self.speed = speed
        self.known: dict[SequenceId, _Known] = {}
        """The sequences that were not released."""

    def propose(self, rows: Sequence[DraftRow]) -> tuple[Proposal, ...]:
        """Return one proposal per row, in order."""
        return tuple(self._propose(row) for row in rows)

    def seconds(self, rows: Sequence[DraftRow]) -> float:
        """How long the proposals take, in seconds: without the levels that were drafted ahead."""
        depths = [max(0, row.budget.max_depth - self._levels_ahead(row)) for row in rows]
        return self.speed.seconds(len(rows), max(depths, default=0), sum(len(row.new_tokens) - 1 for row in rows))

    def release(self, sequence_ids: Sequence[SequenceId]) -> None:
        """Drop what is stored for the sequences."""
        for sequence_id in sequence_ids:
            self.known.pop(sequence_id, None)

    def _propose(self, row: DraftRow) -> Proposal:
        known = self.known.get(row.sequence_id)
        if row.start is not None and row.known_len == 0:
            known = self.known[row.sequence_id] = _Known(row.start)
        if known is None or len(known.states) <= row.known_len:
            fault = RowFault(RowFaultCode.OUT_OF_SYNC, "tokens are missing")
            return Proposal(row.sequence_id, row.base_len, fault=fault)
        states = known.states
        del states[row.known_len + 1 :]
        for token in row.new_tokens:
            states.append(HashedModel.advance(states[-1], token))
        tree, probabilities = self._tree(known, row)
        return Proposal(row.sequence_id, row.base_len, tree, probabilities=probabilities)

    def _levels_ahead(self, row: DraftRow) -> int:
        """Levels of the row's tree that are drafted already: its new tokens were foreseen, and there was time."""
        known = self.known.get(row.sequence_id)
        if known is None or not row.new_tokens or row.new_tokens != known.foreseen:
            return 0
        if not self.speed.depth_seconds:
            return row.budget.max_depth
        passes = int((now() - known.foreseen_at) / self.speed.depth_seconds)
        return max(0, passes - 1)  # the first one found the guess

    def _next(self, state: int, seed: int) -> int:
        """The drafter's best token after a state."""
        is_right = self._model.chance(state, seed, 1) < self._skill.acceptance
        return self._model.decide(state, seed) if is_right else self._model.other(state, seed, 0)

    def _tree(self, known: _Known, row: DraftRow) -> tuple[TokenTree, tuple[float, ...]]:
        model, skill = self._model, self._skill
        sampling = known.start.sampling
        seed = sampling.seed if sampling.temperature > 0 else 0
        state, nodes = known.states[-1], row.budget.max_nodes
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        parent, probability = ROOT, 1.0
        for _ in range(min(row.budget.max_depth, nodes)):
            probability *= skill.acceptance
            token = self._next(state, seed)
            tokens.append(token)
            parents.append(parent)
            probabilities.append(probability)
            parent = len(tokens) - 1
            state = model.advance(state, token)
        if skill.runs_ahead and tokens:
            known.foreseen, known.foreseen_at = (*tokens, self._next(state, seed)), now()
        first = known.states[-1]
        is_first_wrong = bool(tokens) and tokens[0] != model.decide(first, seed)
        for rank in range(1, min(skill.width, nodes - len(tokens) + 1)):
            is_right = is_first_wrong and model.chance(first, seed, 1 + rank) < 0.5
            is_first_wrong = is_first_wrong and not is_right
            tokens.append(model.decide(first, seed) if is_right else model.other(first, seed, rank))
            parents.append(ROOT)
            probabilities.append((1 - skill.acceptance) * 0.5**rank)
        return TokenTree(tuple(tokens), tuple(parents)), tuple(probabilities) if skill.has_probabilities else ()
