"""Lets the acceptance rule walk the trees of a step, after the device has computed the decisions.

Everything that a rule, log-probabilities and evidence need of a GPU is launched before the tokens are read, and arrives
with them, so that the host waits for the GPU once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cluster.core.request import TokenLogprobs
from workers.sampling.acceptance import AcceptanceRule, Accepted, AcceptsTogether, DecidedTree, RootPosition
from workers.sampling.context import GREEDY_BELOW
from workers.transfer import HostCopies
from workers.verify.decider import Decider, Decisions, LaunchedDecisions
from workers.verify.sequence_state import ReadyRow
from workers.verify.verdicts import logprobs_ahead, path_logprobs


@dataclass(frozen=True, slots=True)
class Walked:
    """A row of a step, after the acceptance rule has walked its tree."""

    own: range
    """Indices of the row's decisions."""
    accepted: Accepted
    """Up to the first token that ends the answer; without tokens if nothing is or can be decided."""
    logprobs: tuple[TokenLogprobs, ...] = ()


def own_decisions(ready: Sequence[ReadyRow]) -> list[range]:
    """The indices of each row's decisions among those of the step: the root's, then one per node of its tree."""
    owns: list[range] = []
    end = 0
    for entry in ready:
        first, end = end, end + len(entry.forward.select) - entry.scored
        owns.append(range(first, min(end, first + 1 + len(entry.row.tree.tokens))))
    return owns


class TreeWalk:
    """A walk of the trees of one step: `__init__` launches what it needs of a GPU, and `walk` reads it."""

    def __init__(
        self,
        rule: AcceptanceRule,
        ready: Sequence[ReadyRow],
        launched: LaunchedDecisions,
        vocabulary_size: int,
        copies: HostCopies,
    ) -> None:
        self._rule = rule
        self._ready = ready
        self._owns = own_decisions(ready)
        self._launched = launched
        self._vocabulary_size = vocabulary_size
        samplings = [entry.sequence.start.sampling for entry in ready]
        self._ahead = logprobs_ahead(launched, list(zip(self._owns, samplings, strict=True)), copies)
        self._accept = self._launch_rule(copies)

    def walk(self, decider: Decider) -> tuple[Decisions, list[Walked]]:
        """The decisions, and what is accepted of each row. All ranks call this together."""
        decisions = self._launched.read()

        def accept() -> list[Accepted]:
            steps = self._steps([decisions.tokens[own.start : own.stop] for own in self._owns])
            found = self._accept(steps)
            if self._rule.is_lossless:  # such a rule accepts nothing that the target could not decide
                return found
            deciding = [entry for entry in self._ready if entry.row.decide]
            return [
                step.without_excluded(one, entry.contexts())
                for step, one, entry in zip(steps, found, deciding, strict=True)
            ]

        trees = [entry.row.tree for entry in self._ready if entry.row.decide]
        paths = iter(decider.accept(accept, trees) if self._rule.needs_distribution else accept())
        nothing = Accepted(nodes=(), tokens=())
        samplings = [entry.sequence.start.sampling for entry in self._ready]
        accepted = [
            next(paths).until(sampling.end_token_ids).decided() if entry.row.decide else nothing
            for entry, sampling in zip(self._ready, samplings, strict=True)
        ]
        logprobs = path_logprobs(decisions, list(zip(self._owns, accepted, samplings, strict=True)), self._ahead)
        return decisions, [Walked(*walked) for walked in zip(self._owns, accepted, logprobs, strict=True)]

    def _launch_rule(self, copies: HostCopies) -> Callable[[Sequence[DecidedTree]], list[Accepted]]:
        """Let a rule that looks at all rows together look up what it needs, on ranks that have it."""
        rule, known = self._rule, self._launched.log_probabilities
        if not isinstance(rule, AcceptsTogether):
            return lambda steps: [rule.accept(step) for step in steps]
        if rule.needs_distribution and known is None:
            return _elsewhere
        steps = self._steps([[-1] * len(own) for own in self._owns])
        if known is not None:
            parts = [step.known_log_probabilities for step in steps]
            known = known if sum(map(len, parts)) == len(known) else torch.cat(parts or [known[:0]])
        return rule.launch(steps, known, copies)

    def _steps(self, tokens: Sequence[Sequence[int]]) -> list[DecidedTree]:
        """The trees of the deciding rows, with these decisions."""
        known, steps = self._launched.log_probabilities, list[DecidedTree]()
        for entry, own, decided in zip(self._ready, self._owns, tokens, strict=True):
            row, sampling = entry.row, entry.sequence.start.sampling
            if not row.decide:
                continue
            root = RootPosition(sampling.seed, row.base_len, self._vocabulary_size, sampling.temperature < GREEDY_BELOW)
            distribution = None if known is None else known[own.start : own.stop]
            steps.append(DecidedTree(row.tree, decided, root, distribution, row.distributions))
        return steps


def _elsewhere(_: Sequence[DecidedTree]) -> list[Accepted]:
    raise RuntimeError("the first rank alone has the distributions that the acceptance rule reads")
