"""Decodes several sequences together, with the drafts that the target itself proposes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cluster.core.drafting import NO_DRAFT, DraftBudget, Proposal
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import TokenTree
from cluster.core.verification import StepBatch, StepResult, VerifyRow

Step = Callable[[StepBatch], StepResult]


@dataclass
class Decoded:
    """One sequence: its tokens, and the drafts that were verified."""

    tokens: list[int]
    prompt_len: int
    proposals: list[Proposal] = field(default_factory=list)
    accepted: int = 0
    """Accepted drafted tokens."""
    deepest: int = 0
    """Sum of the depths of all verified trees."""

    @property
    def answer(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self.prompt_len :]


def decode_together(
    step: Step,
    requests: Mapping[str, tuple[tuple[int, ...], SamplingParameters]],
    count: int,
    budget: DraftBudget,
    sources: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Decoded]:
    """Decode at least `count` tokens of every request: name → prompt and sampling parameters. Releases nothing.

    `sources` are what an encoder reads, by the same names.
    """
    sources = sources or {}
    found = {name: Decoded(list(prompt), len(prompt)) for name, (prompt, _) in requests.items()}
    rows = [
        VerifyRow(
            SequenceId(name),
            len(prompt),
            prompt,
            start=SequenceStart(len(prompt), sampling, source=sources.get(name, ())),
            next_budget=budget,
        )
        for name, (prompt, sampling) in requests.items()
    ]
    while rows:
        verdicts = step(StepBatch(tuple(rows))).verdicts
        following: list[VerifyRow] = []
        for row, verdict in zip(rows, verdicts, strict=True):
            assert verdict.fault is None, verdict.fault
            one = found[row.sequence_id]
            one.tokens += verdict.tokens
            one.accepted += verdict.accepted
            one.deepest += row.tree.depth()
            proposal = verdict.proposal or Proposal(row.sequence_id, len(one.tokens))
            if len(one.answer) >= count:
                continue
            assert proposal.base_len == len(one.tokens)
            one.proposals.append(proposal)
            following.append(
                VerifyRow(row.sequence_id, len(one.tokens), (one.tokens[-1],), proposal.tree, next_budget=budget)
            )
        rows = following
    return found


def plain_answers(
    step: Step, requests: Mapping[str, tuple[tuple[int, ...], SamplingParameters]], count: int
) -> dict[str, list[int]]:
    """The first `count` tokens of the answers without drafts."""
    return {name: one.answer[:count] for name, one in decode_together(step, requests, count, NO_DRAFT).items()}


def through_trees(
    step: Step,
    requests: Mapping[str, tuple[tuple[int, ...], SamplingParameters]],
    texts: Mapping[str, list[int]],
    *,
    branches: bool = True,
) -> dict[str, tuple[list[int], int]]:
    """Decode all requests together with drafts: the answer, and how many drafted tokens were accepted.

    A draft is the chain of the tokens that `texts` has next. With `branches`, it has another token at each depth too.
    """
    found: dict[str, tuple[list[int], int]] = {name: ([], 0) for name in texts}
    rows = {
        name: VerifyRow(SequenceId(f"tree {name}"), len(prompt), prompt, start=SequenceStart(len(prompt), sampling))
        for name, (prompt, sampling) in requests.items()
    }
    while rows:
        for name, verdict in zip(tuple(rows), step(StepBatch(tuple(rows.values()))).verdicts, strict=True):
            assert verdict.fault is None
            answer, accepted = found[name]
            answer += verdict.tokens
            found[name] = answer, accepted + verdict.accepted
            row = rows.pop(name)
            likely = texts[name][len(answer) : len(answer) + 3]
            if likely:
                others = [(*likely[:depth], (token + 1) % 90 + 3) for depth, token in enumerate(likely)]
                tree = TokenTree.from_candidates([likely, *(others if branches else ())], 8)
                assert (tree.depth() < len(tree)) == branches
                length = len(requests[name][0]) + len(answer)
                rows[name] = VerifyRow(row.sequence_id, length, (answer[-1],), tree)
    return found
