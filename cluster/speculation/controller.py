"""What was learned of guesses and of time, put to use: how much to ask for, what to keep, what came of it.

No clock and no worker: what happened is told, what to do is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cluster.core.drafting import DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.sequence import Sequence as Answer
from cluster.core.tree import ROOT, TokenTree
from cluster.core.verification import StepSample
from cluster.speculation import acceptance
from cluster.speculation.acceptance import Experience, Record
from cluster.speculation.goodput import Choice, Prospect, budget, choose, keep
from cluster.speculation.latency import Durations
from cluster.speculation.speedup import Ledger

CHOICE_ROUNDS = 4
"""A choice holds for so many rounds while the same sequences decide; four times as many if it is to guess nothing."""
NEWS_ROUNDS = 2
"""After such an answer one chooses anew so soon: what the target decides on its guesses is known by then."""
BEGIN_ADVANTAGE, ALONE_BEGIN_ADVANTAGE = 1.15, 1.03
"""Guessing begins when it promises to be so many times faster than plain decoding; with one sequence at less, since a
drafter then has one prompt to learn beside it."""
LEAST_ADVANTAGE, ALONE_LEAST_ADVANTAGE = 1.05, 1.01
"""And ends when it promises less than this."""
CONTROL_ROUNDS = 64
"""After so many rounds with guesses one goes without: what plain decoding takes must be known to be beaten."""
FULL_ROUNDS = 48
"""And after so many one asks for the most: what larger trees would bring must be known."""
SURE_ADVANTAGE = 1.5
"""Four times as many rounds go by without a control, if guessing is faster by this."""
EAGER_ROWS = 4
"""With so few sequences one asks for the most before anything is known: little is lost, and much is learned at once."""
PATIENCE = 4.0
"""Proposals are waited for this many times as long as they are expected to take."""
LEAST_PATIENCE_SECONDS = 0.01
_JUDGED = 8
"""Guesses of one round that are learned from, each sequence in turn: more would cost more than they tell."""
_DOUBT = 3.0
"""Trees after which a sequence counts as much as all others do."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A tree that came for a sequence, to be held against what the target decides."""

    answer: Answer
    proposal: Proposal
    asked: DraftBudget
    """How large it could have been."""
    conditionals: list[float]
    chances: list[float]


@dataclass(frozen=True, slots=True)
class Weighed:
    """The trees to verify, and what is expected of the round."""

    trees: dict[SequenceId, TokenTree] = field(default_factory=dict)
    step_seconds: float = 0.0


class Judge:
    """Holds what was learned."""

    def __init__(self, most: DraftBudget) -> None:
        self._most = most
        self._steps = Durations()
        self._waits = Durations(floor_seconds=0.5e-3, row_seconds=0.5e-4, grows_from_zero=True)
        self._experience = Experience()
        self._records: dict[SequenceId, Record] = {}
        self._unsettled: list[Guess] = []
        self._turn = 0
        self._choice = Choice((), 1.0, 1.0)
        self._sizes: dict[SequenceId, DraftBudget] = {}
        self._most_sizes: dict[SequenceId, DraftBudget] = {}
        self._holds = 0
        self._rounds = 0
        self._ledger = Ledger()
        self._is_held_back = False
        self._expects_nothing = True

    def begin(self, profile: Iterable[StepSample]) -> None:
        """A target was met that measured its own steps."""
        self._steps = Durations.of_profile(profile)

    def forget(self, sequence_ids: Iterable[SequenceId]) -> None:
        """The sequences are over."""
        for sequence_id in sequence_ids:
            self._records.pop(sequence_id, None)

    # --- before ---

    @property
    def is_resting(self) -> bool:
        """Whether guessing does not pay now, or nothing is known of it yet."""
        return self._expects_nothing or self._is_held_back

    @property
    def is_due(self) -> bool:
        """Whether the choice has held for long enough."""
        return self._holds <= 0

    def choose(self, answers: Sequence[tuple[Answer, DraftBudget]], rows: int, *, halves: bool = False) -> None:
        """Choose anew for `answers`, each with the most that its tree may have, of the `rows` that decide next.

        `halves`: only every other one of them goes in the same step.
        """
        self._most_sizes = {answer.id: most for answer, most in answers}
        self._holds = CHOICE_ROUNDS
        self._sizes = self._choose(answers, rows, halves=halves) if answers else {}
        if self._expects_nothing:
            self._holds *= 4

    def sizes(self, rows: int) -> Mapping[SequenceId, DraftBudget]:
        """How much to ask for in this round, in which `rows` decide; for the others, nothing."""
        self._holds -= 1
        self._is_held_back = bool(self._sizes) and self._ledger.holds_back(rows)
        if not self._sizes or self._is_held_back:
            return {}
        self._rounds += 1
        if self._rounds % (CONTROL_ROUNDS * (4 if self._choice.advantage >= SURE_ADVANTAGE else 1)) == 0:
            return {}
        if self._rounds % FULL_ROUNDS == 0:
            return {sequence_id: self._most_sizes[sequence_id] for sequence_id in self._sizes}
        return self._sizes

    def is_worth(self, seconds: float, rows: int, tokens: int) -> bool:
        """Whether guesses save more than telling takes, of a sequence's share of the steps of its next tokens.

        There are `tokens` of them at most, and half of those are counted on. Of one alone all of its time is taken to
        be saved: nothing would ever be learned, where nothing is told.
        """
        if not self._waits.is_known or not self._steps.is_known:
            return True
        share = self._steps.seconds(rows, rows) / rows
        saved = 1.0 if rows == 1 else max(0.0, 1 - 1 / self._choice.advantage)
        return seconds <= tokens / 2 * share * saved

    def patience(self, rows: int, depth: int) -> float:
        """How long to wait for proposals, in seconds."""
        if not self._waits.is_known:
            return float("inf")
        return max(LEAST_PATIENCE_SECONDS, PATIENCE * self._waits.seconds(rows, depth))

    def _choose(
        self, answers: Sequence[tuple[Answer, DraftBudget]], rows: int, *, halves: bool
    ) -> dict[SequenceId, DraftBudget]:
        if not self._waits.is_known or not self._steps.knows(rows):  # what is to be compared was never seen
            self._expects_nothing = rows > EAGER_ROWS
            self._holds = 1
            return {} if self._expects_nothing else dict(self._most_sizes)
        prospects = [self._prospect(answer, most) for answer, most in answers]
        choice = choose(prospects, self._steps, self._waits, rows)
        if halves and len(prospects) > 1:
            half = choose(prospects[: len(prospects) // 2], self._steps, self._waits, rows // 2)
            choice = replace(choice, goodput=half.goodput)  # against all together and plain
        self._choice = choice
        begin, least = (
            (BEGIN_ADVANTAGE, LEAST_ADVANTAGE) if rows > 1 else (ALONE_BEGIN_ADVANTAGE, ALONE_LEAST_ADVANTAGE)
        )
        self._expects_nothing = choice.advantage < (begin if self._expects_nothing else least)
        if self._expects_nothing:
            return {}
        if rows == 1 and self._ledger.pays(rows):
            # What one more pass is worth the drafter sees in the tree itself; here it is a mean of many.
            return dict(self._most_sizes)
        return {
            answer.id: budget(nodes, prospect.reach[nodes - 1], most)
            for nodes, prospect, (answer, most) in zip(choice.nodes, prospects, answers, strict=True)
            if nodes
        }

    def _prospect(self, answer: Answer, most: DraftBudget) -> Prospect:
        record = self._records.setdefault(answer.id, Record())
        realism = self._experience.realism
        chances = record.curve.beside(self._experience.curve, _DOUBT, most.max_nodes)
        curve = record.curve if sum(record.curve.weights[:1]) > _DOUBT else self._experience.curve
        reach = [min(most.max_depth, curve.reach(count)) for count in range(1, most.max_nodes + 1)]
        return Prospect(tuple(realism * chance for chance in chances), tuple(_rising(reach)), most.max_depth)

    # --- when the trees are there ---

    def weigh(
        self,
        asked: Mapping[SequenceId, tuple[Answer, DraftBudget]],
        proposals: Mapping[SequenceId, Proposal],
        *,
        rows: int,
        tokens: int,
        waited: float,
    ) -> Weighed:
        """Keep the nodes that pay in a step of `tokens` tokens beside them, of which `rows` decide.

        `waited`: seconds that this round has waited for proposals.
        """
        there = [
            self._guess(answer, size, proposal)
            for answer, size in asked.values()
            if (proposal := proposals.get(answer.id)) is not None
        ]
        every = -(-len(there) // _JUDGED)
        self._unsettled += there[self._turn % every :: every] if there else ()
        self._turn += 1
        kept = keep([guess.chances for guess in there], self._steps, rows, tokens, waited)
        trees = {
            guess.answer.id: guess.proposal.tree.subset(nodes)
            for guess, nodes in zip(there, kept.nodes, strict=True)
            if nodes
        }
        return Weighed(trees, kept.seconds)

    def note(self, answer: Answer, asked: DraftBudget, proposal: Proposal) -> None:
        """A proposal came that will not be verified: what the target decides is held against it all the same."""
        self._unsettled.append(self._guess(answer, asked, proposal))

    def _guess(self, answer: Answer, asked: DraftBudget, proposal: Proposal) -> Guess:
        conditionals = self._experience.conditionals(proposal.tree, proposal.probabilities)
        chances = acceptance.chances(proposal.tree, conditionals, self._records.get(answer.id, Record()))
        return Guess(answer, proposal, asked, conditionals, chances)

    # --- after ---

    def stepped(self, rows: int, tokens: int, seconds: float, *, waited: float, committed: int) -> None:
        """A round without prompts took so long beside its wait for proposals, and committed so many tokens."""
        self._steps = self._steps.learned(rows, tokens, seconds)
        if waited > 0.0 or tokens > rows:
            self._ledger.guessed(rows, seconds + waited, committed)
        else:
            self._ledger.plain(rows, seconds)

    def waited(self, rows: int, depth: int, seconds: float) -> None:
        """Proposals for so many sequences, so deep, were waited for."""
        self._waits = self._waits.learned(rows, depth, seconds)

    def answered(self, rows: int, depth: int, seconds: float) -> None:
        """Proposals came that nobody waited for. Others may have been in their way: only a quick answer tells much."""
        if not self._waits.is_known or seconds < self._waits.seconds(rows, depth):
            self._waits = self._waits.learned(rows, depth, seconds)
        self._holds = min(self._holds, NEWS_ROUNDS)

    def settle(self) -> None:
        """Learn from guesses on which the target has decided since."""
        unsettled, self._unsettled = self._unsettled, []
        for guess in unsettled:
            decided = guess.answer.tokens[guess.proposal.base_len :]
            if guess.answer.id not in self._records:
                continue  # its sequence has left
            if _is_decided(guess, decided):
                self._learn(guess, decided)
            else:
                self._unsettled.append(guess)

    def _learn(self, guess: Guess, decided: Sequence[int]) -> None:
        name, tree = guess.answer.id, guess.proposal.tree
        experience, record = self._experience, self._records[name]
        seen = experience.curve.within(guess.asked)
        experience, record = acceptance.learn_tree(experience, record, tree, guess.chances, seen)
        experience, record = acceptance.learn_verdict(
            experience, record, tree, guess.conditionals, decided, is_told=bool(guess.proposal.probabilities)
        )
        self._experience, self._records[name] = experience, record


def _is_decided(guess: Guess, decided: Sequence[int]) -> bool:
    """Whether what was decided has left the tree, at a leaf or aside of it, or will never do so."""
    tree, node = guess.proposal.tree, ROOT
    for token in decided:
        child = tree.child(node, token)
        if child is None:
            return True
        node = child
    return guess.answer.finish is not None or node not in (ROOT, *tree.parents)


def _rising(values: Sequence[int]) -> list[int]:
    rising: list[int] = []
    for value in values:
        rising.append(max(value, rising[-1]) if rising else value)
    return rising
